"""What people read: reports, explanations, timelines, measurements. Nothing below imports it."""
