"""Starting ranks, and finding out which rank this process is."""
