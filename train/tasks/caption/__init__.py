"""Words for clips: which captions are learned, how new ones are found, and how good they are."""
