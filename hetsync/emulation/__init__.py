"""Clusters that are not there: profiles, and devices and links that take as long as these say."""
