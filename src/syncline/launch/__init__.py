"""Starting ranks, and finding out which rank one is."""
