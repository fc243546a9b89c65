"""A training step of many ranks, simulated on an existing engine: SimGrid.

`schemes` lets the schemes and algorithms of `d5suite.distributed` run against a communicator that
only notes what they do; `programs` holds these notes; `symmetry` folds ranks that are alike;
`engine` has SimGrid play them; `outcome` says where the time went. Nothing here needs a framework
or starts a run.
"""
