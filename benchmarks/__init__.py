"""Measurements of Rallypoint's server, side by side with torch's."""
