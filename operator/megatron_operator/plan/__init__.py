"""Pure decisions: a `World` goes in, a `Decision` comes out. No I/O, no clock, no framework.

`world` has the types; `decide.decide` is the whole of it; `reduce` turns API objects into the World's views.
"""
