//! Tests of `enforced.rs`, keyword by keyword.

use serde_json::{Value, json};

use super::enforced::{Detail, enforceable};

/// The enforced part of a schema and the pointers of what is left out.
fn enforced(schema: &Value) -> (Value, Vec<String>) {
    let enforced = enforceable(schema, Detail::Full).unwrap_or_else(|why| panic!("{schema}: {why}"));
    (enforced.schema, enforced.left_out)
}

/// Checks that all of `schema` is enforced, in the form `expected`.
fn whole(schema: &Value, expected: &Value) {
    let (schema_followed, left_out) = enforced(schema);
    assert_eq!((&schema_followed, &left_out[..]), (expected, &[][..]), "{schema}");
}

/// Checks that `schema` is enforced in the form `expected`, without the assertions at `places`.
fn part(schema: &Value, expected: &Value, places: &[&str]) {
    let (schema_followed, left_out) = enforced(schema);
    assert_eq!(&schema_followed, expected, "{schema}");
    assert_eq!(left_out, places, "{schema}");
}

#[test]
fn annotations_are_dropped() {
    let annotated = json!({"type": "string", "title": "T", "description": "D", "default": 1, "examples": [2], "$comment": "C",
        "deprecated": true, "readOnly": true, "format": "color", "contentEncoding": "base64", "x-own": {"type": 5}});
    whole(&annotated, &json!({"type": "string"}));
    whole(&json!({"type": "string", "format": "date"}), &json!({"type": "string", "format": "date"}));
}

#[test]
fn one_of_parts_that_exclude_each_other_is_any_of() {
    for parts in [
        json!([{"type": "string"}, {"type": "null"}]),
        json!([{"const": 1}, {"enum": [2, 3]}]),
        json!([{"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
               {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]}]),
    ] {
        whole(&json!({"oneOf": parts}), &json!({"anyOf": parts}));
    }
    let may_meet = json!([{"type": "integer"}, {"type": "number"}]);
    part(&json!({"oneOf": may_meet}), &json!({"anyOf": may_meet}), &["#/oneOf"]);
    let both = json!({"anyOf": [{"type": "string"}], "oneOf": [{"const": "a"}, {"const": "b"}]});
    let expected = json!({"anyOf": [{"type": "string"}], "allOf": [{"anyOf": [{"const": "a"}, {"const": "b"}]}]});
    whole(&both, &expected);
}

#[test]
fn unenforceable_keywords_are_left_out() {
    let list = json!({"type": "array", "uniqueItems": true, "contains": {"const": 1}, "unevaluatedItems": false});
    part(&list, &json!({"type": "array"}), &["#/contains", "#/unevaluatedItems", "#/uniqueItems"]);
    let object = json!({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]},
        "dependentSchemas": {"a": {"required": ["b"]}}, "unevaluatedProperties": false});
    part(&object, &json!({"type": "object"}), &["#/dependentSchemas", "#/if", "#/unevaluatedProperties"]);
    let inner = json!({"properties": {"a/b~c": {"pattern": "^(?=x)y"}}});
    part(&inner, &json!({"properties": {"a/b~c": {}}}), &["#/properties/a~1b~0c/pattern"]);
    // These keywords restrict nothing.
    let nothing =
        json!({"uniqueItems": false, "unevaluatedProperties": true, "dependentSchemas": {}, "if": {"const": 1}});
    whole(&nothing, &json!({}));
    part(&json!({"type": "text"}), &json!({}), &["#/type"]);
}

#[test]
fn negations_of_types_and_names_are_enforced() {
    whole(
        &json!({"not": {"type": "null"}}),
        &json!({"allOf": [
        {"type": ["array", "boolean", "number", "object", "string"]}]}),
    );
    let without_a = json!({"allOf": [{"type": "object", "properties": {"a": false}}]});
    whole(&json!({"not": {"required": ["a"]}}), &without_a);
    part(&json!({"not": {"const": 1}}), &json!({}), &["#/not"]);
}

#[test]
fn dependent_names_are_absent_or_complete() {
    let schema = json!({"type": "object", "dependentRequired": {"a": ["b", "c"]}});
    let either = json!({"anyOf": [{"properties": {"a": false}}, {"required": ["a", "b", "c"]}]});
    whole(&schema, &json!({"type": "object", "allOf": [either]}));
    let names: serde_json::Map<_, _> = (0..5).map(|i| (i.to_string(), json!(["x"]))).collect();
    part(&json!({"dependentRequired": names}), &json!({}), &["#/dependentRequired"]);
}

#[test]
fn property_names_follow_their_schema() {
    whole(
        &json!({"propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}}),
        &json!({"patternProperties": {"^[a-z]+$": {"type": "integer"}}, "additionalProperties": false}),
    );
    whole(
        &json!({"propertyNames": {"enum": ["a", "b"]}}),
        &json!({"properties": {"a": true, "b": true}, "additionalProperties": false}),
    );
    whole(&json!({"propertyNames": {"type": "string"}}), &json!({}));
    whole(&json!({"propertyNames": false}), &json!({"additionalProperties": false}));
    for (bounds, pattern) in [
        (json!({"minLength": 2}), "^[\\s\\S]{2,}$"),
        (json!({"type": "string", "minLength": 1, "maxLength": 4}), "^[\\s\\S]{1,4}$"),
    ] {
        let expected = json!({"patternProperties": {pattern: true}, "additionalProperties": false});
        whole(&json!({"propertyNames": bounds}), &expected);
    }
    let one = json!({"properties": {"a": true}, "additionalProperties": false});
    whole(&json!({"propertyNames": {"const": "a"}}), &one);
    whole(&json!({"propertyNames": {"type": "integer", "enum": ["a"]}}), &json!({"additionalProperties": false}));
    let both = json!({"propertyNames": {"minLength": 2, "pattern": "^x"}});
    part(&both, &json!({}), &["#/propertyNames"]);
    part(
        &json!({"propertyNames": {"pattern": "^x"}, "properties": {"x": true}}),
        &json!({"properties": {"x": true}}),
        &["#/propertyNames"],
    );
}

#[test]
fn an_object_of_no_properties_names_none() {
    let none = json!({"type": "object", "properties": {"a": true}, "maxProperties": 0});
    whole(&none, &json!({"type": "object", "additionalProperties": false}));
}

#[test]
fn references_lead_to_definitions() {
    let definition = json!({"type": "integer"});
    for (reference, definitions) in [
        ("#/$defs/A", json!({"$defs": {"A": definition}})),
        ("#/definitions/List%3Cint%3E", json!({"definitions": {"List<int>": definition}})),
        ("#/$defs/a~1b", json!({"$defs": {"a/b": definition}})),
        ("#number", json!({"$defs": {"A": {"$anchor": "number", "type": "integer"}}})),
        ("https://example.com/a", json!({"$defs": {"A": {"$id": "https://example.com/a", "type": "integer"}}})),
    ] {
        let mut schema = definitions;
        schema["properties"] = json!({"n": {"$ref": reference}});
        let expected = json!({"properties": {"n": {"$ref": "#/$defs/d0"}}, "$defs": {"d0": definition}});
        whole(&schema, &expected);
    }
    part(&json!({"items": {"$ref": "#/$defs/none"}}), &json!({"items": {}}), &["#/items/$ref"]);
    part(&json!({"$ref": "https://example.com/elsewhere.json"}), &json!({}), &["#/$ref"]);
    // A recursive schema.
    let tree = json!({"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}});
    let inner =
        json!({"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/d0"}}}});
    let mut expected = inner.clone();
    expected["$defs"] = json!({"d0": inner});
    whole(&tree, &expected);
}

#[test]
fn references_that_lead_back_without_a_value_between_are_left_out() {
    part(&json!({"$ref": "#", "type": "string"}), &json!({"type": "string"}), &["#/$ref"]);
    let ring = json!({"$ref": "#/$defs/A", "$defs": {"A": {"allOf": [{"$ref": "#/$defs/B"}]},
        "B": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}});
    let (_, left_out) = enforced(&ring);
    // The reference to B is left out, so B's own reference is gone, too.
    assert_eq!(left_out, ["#/$defs/A/allOf/0/$ref"]);
    // A schema that is merged with a part of itself is infinite.
    let merged = json!({"$ref": "#/$defs/A", "$defs": {"A": {"items": {"allOf": [{"$ref": "#/$defs/A"}]}}}});
    assert_eq!(enforced(&merged).1, [""; 0]);
    assert_eq!(enforceable(&merged, Detail::Flat).unwrap().left_out, ["#/$defs/A/items/allOf/0/$ref"]);
}

#[test]
fn bounds_are_exact_or_left_out() {
    whole(
        &json!({"minimum": 0, "exclusiveMaximum": 9007199254740992u64}),
        &json!({"minimum": 0.0, "exclusiveMaximum": 9007199254740992.0}),
    );
    part(&json!({"maximum": 1e300, "minimum": i64::MIN}), &json!({}), &["#/maximum", "#/minimum"]);
    // Draft 4.
    let (flagged, left_out) = enforced(&json!({"minimum": 2, "exclusiveMinimum": true}));
    assert_eq!((flagged["exclusiveMinimum"].as_f64(), left_out.len()), (Some(2.0), 0));
    part(
        &json!({"multipleOf": 86_400, "items": {"multipleOf": 99_991}}),
        &json!({"multipleOf": 86_400, "items": {}}),
        &["#/items/multipleOf"],
    );
}

#[test]
fn types_of_older_dialects_are_read() {
    whole(&json!({"type": "string", "nullable": true}), &json!({"anyOf": [{"type": "string"}, {"type": "null"}]}));
    whole(
        &json!({"items": [{"type": "string"}], "additionalItems": false}),
        &json!({"prefixItems": [{"type": "string"}], "additionalItems": false}),
    );
    whole(&json!({"properties": {"a": {"required": true}}}), &json!({"properties": {"a": {}}}));
}

#[test]
fn patterns_of_names_are_enforced_if_they_cannot_overlap() {
    let apart = json!({"patternProperties": {"^a": {"type": "string"}, "^b": {"type": "integer"}}});
    whole(&apart, &apart);
    part(&json!({"patternProperties": {"^(?!x)": {"type": "string"}}}), &json!({}), &["#/patternProperties/^(?!x)"]);
    let rough = enforceable(
        &json!({"patternProperties": {"^a": {}}, "additionalProperties": false, "items": {"pattern": "a"}}),
        Detail::Rough,
    )
    .unwrap();
    assert_eq!(rough.schema, json!({"items": {}}));
    assert_eq!(rough.left_out, ["#/additionalProperties", "#/items/pattern", "#/patternProperties"]);
}

#[test]
fn invalid_schemas_are_refused_with_their_pointer() {
    for (schema, message) in [
        (json!(5), "# is no schema: it must be an object or a boolean"),
        (json!({"properties": {"a": []}}), "#/properties/a is no schema: it must be an object or a boolean"),
        (json!({"anyOf": {}}), "#/anyOf must be a list of schemas"),
        (json!({"minLength": -1}), "#/minLength must be a whole number"),
        (json!({"required": [1]}), "#/required must be a list of strings"),
        (json!({"type": 1}), "#/type must be a string or a list of strings"),
        (json!({"$ref": 1}), "#/$ref must be a string"),
    ] {
        assert_eq!(enforceable(&schema, Detail::Full), Err(message.into()), "{schema}");
    }
}
