{#
  Reads one of several matrices of a kernel, whose parts have the forms that `fields` lists, see `matrix_functions` in
  src/shader.rs. What a unit takes is kept as words, so that it needs the same registers whatever its type is.
  Bounds: those of the forms: a row is below the last of its part, and parts have as many rows as their form.
#}
{% set n_forms = fields | length %}
{% for form in range(n_forms) %}
var<private> {{ prefix }}_form_{{ form }}_at: u32;
{% endfor %}
{% for part in range(n_parts) %}
var<private> {{ prefix }}_{{ part }}_at: u32;
{% endfor %}
{% if n_forms == 1 and n_parts == 1 %}
alias {{ prefix }}_Raw8 = {{ prefix }}_form_0_Raw8;
fn {{ prefix }}_load8(row: u32, unit: u32) -> {{ prefix }}_Raw8 {
    {{ prefix }}_form_0_at = {{ prefix }}_0_at;
    return {{ prefix }}_form_0_load8(row, unit);
}
fn {{ prefix }}_codes8(row: u32, raw: {{ prefix }}_Raw8) -> W8 { return {{ prefix }}_form_0_codes8(raw); }
fn {{ prefix }}_scale8(row: u32, raw: {{ prefix }}_Raw8) -> f32 { return {{ prefix }}_form_0_scale8(raw); }
{% if integer %}
fn {{ prefix }}_dots8(row: u32, raw: {{ prefix }}_Raw8, x: X8) -> f32 { return {{ prefix }}_form_0_dots8(raw, x); }
{% endif %}
{% else %}
{% for part in range(n_parts) %}
var<private> {{ prefix }}_{{ part }}_first: u32;
var<private> {{ prefix }}_{{ part }}_form: u32;
{% endfor %}
alias {{ prefix }}_Raw8 = vec4<u32>;
{% macro raw(form) %}{{ prefix }}_form_{{ form }}_Raw8({% for f in fields[form] %}raw.{{ "xyzw"[loop.index0] }}{{ ", " if not loop.last }}{% endfor %}){% endmacro %}
{# The same for each form: the one of the row's part is taken. #}
{% macro by_form(call) %}
{% for form in range(n_forms) %}
    {% if form < n_forms - 1 %}if form == {{ form }}u {% endif %}{ {{ call | replace("FORM", prefix ~ "_form_" ~ form) | replace("RAW", raw(form)) }} }
{% endfor %}
{% endmacro %}
{% macro find_form() %}
    var form = {{ prefix }}_0_form;
{% for part in range(1, n_parts) %}
    if row >= {{ prefix }}_{{ part }}_first { form = {{ prefix }}_{{ part }}_form; }
{% endfor %}
{% endmacro %}
fn {{ prefix }}_load8(row: u32, unit: u32) -> {{ prefix }}_Raw8 {
{{ find_form() }}
    var at = {{ prefix }}_0_at;
    var first = 0u;
{% for part in range(1, n_parts) %}
    if row >= {{ prefix }}_{{ part }}_first {
        at = {{ prefix }}_{{ part }}_at;
        first = {{ prefix }}_{{ part }}_first;
    }
{% endfor %}
{% for form in range(n_forms) %}
    {% if form < n_forms - 1 %}if form == {{ form }}u {% endif %}{
        {{ prefix }}_form_{{ form }}_at = at;
        let raw = {{ prefix }}_form_{{ form }}_load8(row - first, unit);
        return vec4<u32>({% for f in fields[form] %}raw.{{ f }}, {% endfor %}{% for _ in range(4 - fields[form] | length) %}0u{{ ", " if not loop.last }}{% endfor %});
    }
{% endfor %}
}
fn {{ prefix }}_codes8(row: u32, raw: {{ prefix }}_Raw8) -> W8 {
{{ find_form() }}
{{ by_form("return FORM_codes8(RAW);") }}
}
fn {{ prefix }}_scale8(row: u32, raw: {{ prefix }}_Raw8) -> f32 {
{{ find_form() }}
{{ by_form("return FORM_scale8(RAW);") }}
}
{% if integer %}
fn {{ prefix }}_dots8(row: u32, raw: {{ prefix }}_Raw8, x: X8) -> f32 {
{{ find_form() }}
{{ by_form("return FORM_dots8(RAW, x);") }}
}
{% endif %}
{% endif %}
