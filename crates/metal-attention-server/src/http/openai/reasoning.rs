//! The fields of a request that control reasoning: whether the model reasons, with which effort, and for how
//! many tokens.

use metal_attention_chat::ReasoningEffort;
use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

use crate::http::ApiError;
use crate::http::job::reasoning::ReasoningRequest;

/// The fields that control reasoning, by the names that different clients use.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[schema(as = ThinkingFields)]
pub struct ReasoningFields {
    /// The effort of reasoning; `none`: the model does not reason.
    #[schema(schema_with = effort)]
    reasoning_effort: Option<ReasoningEffort>,
    /// These settings as an object.
    reasoning: Option<Reasoning>,
    /// Whether the model reasons.
    enable_thinking: Option<bool>,
    /// Whether the model reasons, and the maximum number of tokens, as in Anthropic's API.
    thinking: Option<Thinking>,
    /// Whether the model reasons, or its effort.
    think: Option<Think>,
    /// Maximum tokens of reasoning; -1: unlimited.
    #[schema(minimum = -1)]
    thinking_budget_tokens: Option<i64>,
    /// An alias of `thinking_budget_tokens`.
    #[schema(minimum = -1)]
    thinking_budget: Option<i64>,
    /// An alias of `thinking_budget_tokens`.
    #[schema(minimum = -1)]
    thinking_token_budget: Option<i64>,
    /// An alias of `thinking_budget_tokens`.
    #[schema(minimum = -1)]
    reasoning_budget: Option<i64>,
}

/// The settings of reasoning as an object.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
struct Reasoning {
    /// The effort.
    #[schema(schema_with = effort)]
    effort: Option<ReasoningEffort>,
    /// Maximum tokens.
    #[schema(minimum = -1)]
    max_tokens: Option<i64>,
    /// Whether the model reasons.
    enabled: Option<bool>,
}

/// Whether the model reasons.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected true, false, or an object with a type")]
enum Thinking {
    /// Whether the model reasons.
    Enabled(bool),
    /// With a maximum number of tokens.
    Budget {
        /// Whether the model reasons.
        #[serde(rename = "type")]
        kind: Option<ThinkingKind>,
        /// Maximum tokens.
        #[schema(minimum = -1)]
        budget_tokens: Option<i64>,
    },
}

/// Whether the model reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ThinkingKind {
    /// The model reasons.
    Enabled,
    /// The model decides.
    Adaptive,
    /// The model decides.
    Auto,
    /// The model does not reason.
    Disabled,
}

/// Whether the model reasons, or its effort.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected true, false, \"low\", \"medium\" or \"high\"")]
enum Think {
    /// Whether the model reasons.
    Enabled(bool),
    /// The effort.
    #[schema(value_type = String)]
    Effort(ReasoningEffort),
}

/// The schema of an [`ReasoningEffort`]: its names, or null.
fn effort() -> Object {
    let names = ReasoningEffort::ALL.map(|effort| Some(effort.name()));
    let types = SchemaType::from_iter([Type::String, Type::Null]);
    ObjectBuilder::new().schema_type(types).enum_values(Some(names.into_iter().chain([None]))).build()
}

impl ReasoningFields {
    /// The settings of reasoning without an interface's names. `variables`: the template variables that the request
    /// sets.
    pub fn request(&self, variables: Map<String, Value>) -> Result<ReasoningRequest, ApiError> {
        Ok(ReasoningRequest { switch: self.switch(), effort: self.effort(), budget: self.budget()?, variables })
    }

    /// The effort, with the name of its field.
    fn effort(&self) -> Option<(&'static str, ReasoningEffort)> {
        let think = match self.think {
            Some(Think::Effort(effort)) => Some(effort),
            Some(Think::Enabled(_)) | None => None,
        };
        let efforts = [
            ("reasoning_effort", self.reasoning_effort),
            ("reasoning", self.reasoning.as_ref().and_then(|reasoning| reasoning.effort)),
            ("think", think),
        ];
        efforts.into_iter().find_map(|(field, effort)| Some((field, effort?)))
    }

    /// Whether the model reasons, with the name of the field.
    fn switch(&self) -> Option<(&'static str, bool)> {
        let thinking = match &self.thinking {
            Some(Thinking::Enabled(on)) => Some(*on),
            Some(Thinking::Budget { kind: Some(ThinkingKind::Enabled), .. }) => Some(true),
            Some(Thinking::Budget { kind: Some(ThinkingKind::Disabled), .. }) => Some(false),
            Some(Thinking::Budget { kind: Some(ThinkingKind::Adaptive | ThinkingKind::Auto) | None, .. }) | None => {
                None
            }
        };
        let think = match self.think {
            Some(Think::Enabled(on)) => Some(on),
            Some(Think::Effort(_)) | None => None,
        };
        let switches = [
            ("enable_thinking", self.enable_thinking),
            ("thinking", thinking),
            ("reasoning", self.reasoning.as_ref().and_then(|reasoning| reasoning.enabled)),
            ("think", think),
        ];
        switches.into_iter().find_map(|(field, on)| Some((field, on?)))
    }

    /// The maximum tokens of reasoning that are set, with the names of their fields.
    fn budgets(&self) -> impl Iterator<Item = (&'static str, i64)> {
        let nested = match &self.thinking {
            Some(Thinking::Budget { budget_tokens, .. }) => *budget_tokens,
            Some(Thinking::Enabled(_)) | None => None,
        };
        let budgets = [
            ("thinking_budget_tokens", self.thinking_budget_tokens),
            ("thinking_budget", self.thinking_budget),
            ("thinking_token_budget", self.thinking_token_budget),
            ("reasoning_budget", self.reasoning_budget),
            ("thinking", nested),
            ("reasoning", self.reasoning.as_ref().and_then(|reasoning| reasoning.max_tokens)),
        ];
        budgets.into_iter().filter_map(|(name, budget)| Some((name, budget?)))
    }

    /// Maximum tokens of reasoning, with the name of the field; `None`: unlimited.
    fn budget(&self) -> Result<Option<(&'static str, usize)>, ApiError> {
        match self.budgets().next() {
            None | Some((_, -1)) => Ok(None),
            Some((name, budget @ 0..)) => Ok(Some((name, usize::try_from(budget).unwrap_or(usize::MAX)))),
            Some((name, budget)) => {
                let message = format!("{name} is {budget}, but it must be a number of tokens, or -1 for any number");
                Err(ApiError::field(name, message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use metal_attention_chat::ChatTemplate;
    use serde_json::json;

    use super::*;
    use crate::http::notes::Notes;

    fn template(name: &str) -> ChatTemplate {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../metal-attention-chat/tests/data/templates");
        ChatTemplate::new(&std::fs::read_to_string(format!("{folder}/{name}.jinja")).unwrap()).unwrap()
    }

    /// The template variables, the budget, and the fields without effect.
    fn wish(name: &str, fields: &Value) -> (Value, Option<usize>, Notes) {
        let mut notes = Notes::default();
        let variables = fields["chat_template_kwargs"].as_object().cloned().unwrap_or_default();
        let request: ReasoningFields = serde_json::from_value(fields.clone()).unwrap();
        let wish = request.request(variables).unwrap().settings(&template(name), &mut notes);
        (wish.variables.into(), wish.budget, notes)
    }

    fn ignored(names: &[&str]) -> Notes {
        let mut notes = Notes::default();
        for name in names {
            notes.ignored(*name);
        }
        notes
    }

    #[test]
    fn reasoning_can_be_disabled_by_many_fields() {
        for fields in [
            json!({"reasoning_effort": "none"}),
            json!({"reasoning": {"effort": "none"}}),
            json!({"reasoning": {"enabled": false}}),
            json!({"enable_thinking": false}),
            json!({"thinking": {"type": "disabled"}}),
            json!({"thinking": false}),
            json!({"think": false}),
            json!({"thinking_budget_tokens": 0}),
            json!({"reasoning_budget": 0}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
        ] {
            assert_eq!(wish("qwen3", &fields), (json!({"enable_thinking": false}), Some(0), ignored(&[])), "{fields}");
            let variables = fields.get("chat_template_kwargs").cloned().unwrap_or_else(|| json!({}));
            assert_eq!(wish("llama-3.1", &fields), (variables, None, ignored(&[])), "{fields}");
        }
        let none = json!({"reasoning_effort": "none"});
        assert_eq!(wish("gpt-oss", &none).0, json!({"reasoning_effort": "low"}));
        assert_eq!(wish("seed-oss", &none).0, json!({"thinking_budget": 0}));
        assert_eq!(wish("granite-3.3", &none).0, json!({"thinking": false}));
        let kept = json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}});
        assert_eq!(wish("qwen3", &kept), (json!({"enable_thinking": true}), None, ignored(&[])));
    }

    #[test]
    fn efforts_reach_templates_that_know_them() {
        let effort = |name: &str, effort: &str| wish(name, &json!({"reasoning_effort": effort}));
        for (requested, expected) in
            [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("max", "high")]
        {
            assert_eq!(effort("gpt-oss", requested), (json!({"reasoning_effort": expected}), None, ignored(&[])));
        }
        assert_eq!(effort("qwen3", "high"), (json!({}), None, ignored(&["reasoning_effort"])));
        let nested = wish("qwen3", &json!({"reasoning": {"effort": "low", "summary": "auto"}}));
        assert_eq!(nested, (json!({}), None, ignored(&["reasoning"])));
        let request = json!({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}});
        assert_eq!(wish("gpt-oss", &request).0, json!({"reasoning_effort": "high"}));
        for wrong in
            [json!({"reasoning_effort": "huge"}), json!({"reasoning_effort": 1}), json!({"reasoning": {"effort": "x"}})]
        {
            assert!(serde_json::from_value::<ReasoningFields>(wrong).is_err());
        }
    }

    #[test]
    fn budgets_count_tokens() {
        assert_eq!(
            wish("qwen3", &json!({"thinking": {"type": "enabled", "budget_tokens": 64}})),
            (json!({"enable_thinking": true}), Some(64), ignored(&[]))
        );
        assert_eq!(
            wish("seed-oss", &json!({"thinking_budget": 512})),
            (json!({"thinking_budget": 512}), Some(512), ignored(&[]))
        );
        assert_eq!(wish("qwen3", &json!({"reasoning_budget": -1, "thinking": null})), (json!({}), None, ignored(&[])));
        assert_eq!(
            wish("llama-3.1", &json!({"thinking_token_budget": 9, "enable_thinking": true})),
            (json!({}), None, ignored(&["enable_thinking", "thinking_token_budget"]))
        );
        let negative: ReasoningFields = serde_json::from_value(json!({"thinking_budget": -2})).unwrap();
        assert!(negative.request(Map::new()).is_err());
    }
}
