"""The last chunk of a stream has usage and no choices. The others have a finish_reason, null except for the last one, and deltas of
complete characters."""

from lib import *

T = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
_, s = says(T, "é🙂x", control=["<|im_start|>", "<|im_end|>"], stream_options={"include_usage": True})
ev = s["events"]
check("[DONE]", ev[-1], "[DONE]")
check("usage", (ev[-2]["choices"], "usage" in ev[-2]), ([], True))
check(
    "finish_reason",
    [c["finish_reason"] for e in ev[:-2] for c in e["choices"]],
    lambda l: l[-1] == "stop" and set(l[:-1]) == {None},
)
check("deltas", [c["delta"].get("content") for e in ev[:-2] for c in e["choices"] if c["delta"].get("content")], ["é", "🙂", "x"])
done()
