"""Pure decisions: a `World` goes in, a `Decision` comes out. No I/O, no clock, no framework."""
