"""Pure decisions. `decide.decide` maps a `World` to a `Decision` without I/O, clock or framework.

The module `world` has the types. The module `reduce` converts API objects to the views of a World.
"""
