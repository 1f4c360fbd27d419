"""reasoning_effort is passed to templates that use it; "none" disables thoughts."""

from lib import *

u = [{"role": "user", "content": "x"}]
for effort in ["low", "high"]:
    want = render(template("gpt-oss"), u, chat_template_kwargs={"reasoning_effort": effort})
    check(f"gpt-oss {effort}", render(template("gpt-oss"), u, reasoning_effort=effort)[-400:], want[-400:])
check(
    "an explicit kwarg wins",
    render(template("gpt-oss"), u, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})[-400:],
    render(template("gpt-oss"), u, chat_template_kwargs={"reasoning_effort": "high"})[-400:],
)
for name in ["qwen3.5", "qwen3"]:
    check(
        f"{name} none",
        render(template(name), u, reasoning_effort="none"),
        render(template(name), u, chat_template_kwargs={"enable_thinking": False}),
    )
done()
