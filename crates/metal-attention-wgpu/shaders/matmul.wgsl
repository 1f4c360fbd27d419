// Bounds: those of the included file.
{% include "matmul_cooperative.wgsl" if cooperative else "matmul_tiled.wgsl" %}
