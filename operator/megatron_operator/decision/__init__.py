"""Pure decisions: `decide.decide` maps a `World` to a `Decision`. No I/O, no clock, no framework.

`world` has the types; `reduce` converts API objects to the views of a World.
"""
