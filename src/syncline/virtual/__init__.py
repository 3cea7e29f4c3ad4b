"""Virtual time: the clock, and links whose flows share them."""
