"""What one step says of itself, for people: from a `Step` to an `Explanation`. Pure, without torch.

`exposure` where communication is not hidden, `advice` what would help, `facts` the rest, `text` how it is put on a
screen, `explained` all of it together.
"""

from dp_compile.insight.explanation.explained import Explanation as Explanation
from dp_compile.insight.explanation.explained import explanation_of as explanation_of
