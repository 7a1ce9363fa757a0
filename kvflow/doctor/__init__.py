"""`kvflow doctor`: looks at a machine, or at a pair of engines, before traffic does.

Rules: a check is a pure function from facts to findings and touches nothing; facts come from thin
probes, each of which is run at most once and only when a check asks for it. What is slow or may
crash (NIXL) runs in a process of its own. The checks are the rows of `examine.CHECKS`.
"""
