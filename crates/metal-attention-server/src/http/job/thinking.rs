//! What a request says about thoughts, without the names that dialects have for it: whether the model thinks, how hard, and
//! how long.

use metal_attention_chat::{ChatTemplate, ReasoningEffort, Thinking};
use serde_json::{Map, Value};

use crate::http::notes::Notes;

/// What a request says about thoughts. Each wish comes with the name of the field that it stands in.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ThinkingRequest {
    /// Whether the model thinks.
    pub switch: Option<(&'static str, bool)>,
    /// How hard; [`ReasoningEffort::None`]: not at all.
    pub effort: Option<(&'static str, ReasoningEffort)>,
    /// Most tokens of thoughts.
    pub budget: Option<(&'static str, usize)>,
    /// Variables for the template, which win over the other wishes.
    pub variables: Map<String, Value>,
}

/// What becomes of it with a model's template.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ThinkingWish {
    /// Variables for the template.
    pub variables: Map<String, Value>,
    /// Most tokens of thoughts; `None`: any number.
    pub budget: Option<usize>,
}

impl ThinkingRequest {
    /// What the request means for the model with this template. Fields without an effect are noted.
    pub fn wish(&self, template: &ChatTemplate, notes: &mut Notes) -> ThinkingWish {
        let mut variables = self.variables.clone();
        let own = |name: &str| variables.get(name).and_then(Value::as_bool);
        let own_switch = own("enable_thinking").or(own("thinking"));
        let thinks = template.thinks();
        let own_budget = || variables.get("thinking_budget")?.as_u64().map(|n| ("chat_template_kwargs", n as usize));
        let budget = self.budget.or_else(own_budget);
        let is_off = self.switch.is_some_and(|(_, on)| !on)
            || self.effort.is_some_and(|(_, effort)| effort == ReasoningEffort::None)
            || budget.is_some_and(|(_, budget)| budget == 0);
        if own_switch.map_or(is_off, |on| !on) {
            template.set_thinking(Thinking::OFF, &mut variables);
            return ThinkingWish { variables, budget: thinks.then_some(0) };
        }
        if let Some((field, true)) = self.switch
            && !template.set_thinking(Thinking::On, &mut variables)
            // How hard it thinks says that it does.
            && self.effort.is_none()
        {
            notes.ignored(field);
        }
        if let Some((field, effort)) = self.effort.filter(|(_, effort)| *effort != ReasoningEffort::None)
            && !template.set_thinking(Thinking::Effort(effort), &mut variables)
        {
            notes.ignored(field);
        }
        if let Some((field, budget)) = budget {
            if template.reads("thinking_budget") {
                variables.entry("thinking_budget").or_insert(budget.into());
            }
            if !thinks {
                notes.ignored(field);
            }
        }
        ThinkingWish { variables, budget: budget.map(|(_, budget)| budget).filter(|_| thinks) }
    }
}
