"""Operators that hetpipe adds to torch's, and corrected decompositions of torch's operators.

`hetpipe.sdk.graph` imports these modules, which register their operators with torch.
"""
