"""`moebius-rollout report`: reads step reports of several runs, compares them, and writes one page."""
