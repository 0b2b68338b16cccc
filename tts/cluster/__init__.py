"""Several machines by way of Ray: our services behind Ray Serve, or servers placed by actors.

Optional: only these modules import ray, and no other module imports them.
"""
