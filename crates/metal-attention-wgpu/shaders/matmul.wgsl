// Bounds: those of the file that it becomes.
{% include "matmul_cooperative.wgsl" if cooperative else "matmul_tiled.wgsl" %}
