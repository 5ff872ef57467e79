"""Pure geometry of the store: what is stored, when a prefix can be resumed, and which bytes move."""
