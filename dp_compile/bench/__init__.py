"""What data-parallel training costs, measured side by side: workloads x modes x links, in one run."""
