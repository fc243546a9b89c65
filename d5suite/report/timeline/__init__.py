"""The timeline of a trace: a page to look around in, and a picture of one step for papers."""
