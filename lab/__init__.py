"""Several machines on one: network namespaces with shaped links.

For developers of Syncline. Unmodified programs run in it as they would on a cluster:

    with Lab(machines=4, rate="1gbit") as lab:
        jobs = lab.torchrun(["train.py"], ranks=2)
        lab.cut(3)
"""

from lab.network import Lab, LabError, Link

__all__ = ["Lab", "LabError", "Link"]
