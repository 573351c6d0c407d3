"""Reports, explanations, timelines and measurements for users. No lower package imports this one."""
