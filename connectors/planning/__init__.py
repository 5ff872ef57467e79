"""Pure geometry: which bytes of which blocks go where. Imports numpy and the standard library only."""
