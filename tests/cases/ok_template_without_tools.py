"""If the template does not render tools, the messages describe them."""

from lib import *

u = [{"role": "user", "content": "x"}]

got = render("{% for m in messages %}{{ m.content }}{% endfor %}", u, [tool("probe", {"x": {"type": "string"}})])
check("the function is named", "probe" in got, True)
done()
