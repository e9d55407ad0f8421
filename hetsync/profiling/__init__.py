"""What the devices and links of a cluster can do: measured, written down, and read again."""
