"""The nodes of a Ray cluster that a run joins: what there is, what each sees, where its processes stand.

Ray is imported by processes of their own alone (`ask`, `follow`): a cluster that does not answer hangs only
them. What a node is asked (`on_node`) runs there, as a task that takes none of its CPUs.
"""
