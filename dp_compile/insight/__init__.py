"""What people read: reports, explanations, timelines, dumps. Nothing below imports it."""
