{% if cooperative and subgroup_size > 0 and (cooperative_f16 or cooperative_f32) %}
{% include "matmul_cooperative.wgsl" %}
{% else %}
{% include "matmul_tiled.wgsl" %}
{% endif %}
