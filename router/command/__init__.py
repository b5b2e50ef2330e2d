"""The commands behind `diptych`: what a person at a terminal touches."""
