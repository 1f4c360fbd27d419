//! The settings of reasoning in a request, without an interface's names: whether the model reasons, with
//! which effort, and for how many tokens.

use metal_attention_chat::{ChatTemplate, ReasoningEffort, ReasoningSetting};
use serde_json::{Map, Value};

use crate::http::notes::Notes;

/// The settings of reasoning in a request. Each has the name of its field, for notes and errors; `None`: not set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReasoningRequest {
    /// Whether the model reasons.
    pub switch: Option<(&'static str, bool)>,
    /// The effort; [`ReasoningEffort::None`]: the model does not reason.
    pub effort: Option<(&'static str, ReasoningEffort)>,
    /// Maximum tokens of reasoning.
    pub budget: Option<(&'static str, usize)>,
    /// Variables for the template, which take precedence over the other settings.
    pub variables: Map<String, Value>,
}

/// The settings of reasoning for a model's template.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReasoningSettings {
    /// Variables for the template.
    pub variables: Map<String, Value>,
    /// Maximum tokens of reasoning; `None`: unlimited.
    pub budget: Option<usize>,
}

impl ReasoningRequest {
    /// Returns the settings for `template`. Notes the fields that have no effect with it.
    pub fn settings(&self, template: &ChatTemplate, notes: &mut Notes) -> ReasoningSettings {
        let mut variables = self.variables.clone();
        let variable = |name: &str| variables.get(name).and_then(Value::as_bool);
        let variables_switch = variable("enable_thinking").or(variable("thinking"));
        let can_reason = template.can_reason();
        let variables_budget =
            || variables.get("thinking_budget")?.as_u64().map(|n| ("chat_template_kwargs", n as usize));
        let budget = self.budget.or_else(variables_budget);
        let is_off = self.switch.is_some_and(|(_, on)| !on)
            || self.effort.is_some_and(|(_, effort)| effort == ReasoningEffort::None)
            || budget.is_some_and(|(_, budget)| budget == 0);
        if variables_switch.map_or(is_off, |on| !on) {
            template.set_reasoning(ReasoningSetting::OFF, &mut variables);
            return ReasoningSettings { variables, budget: can_reason.then_some(0) };
        }
        if let Some((field, true)) = self.switch
            && !template.set_reasoning(ReasoningSetting::On, &mut variables)
            // An effort implies that the model reasons.
            && self.effort.is_none()
        {
            notes.ignored(field);
        }
        if let Some((field, effort)) = self.effort.filter(|(_, effort)| *effort != ReasoningEffort::None)
            && !template.set_reasoning(ReasoningSetting::Effort(effort), &mut variables)
        {
            notes.ignored(field);
        }
        if let Some((field, budget)) = budget {
            if template.reads("thinking_budget") {
                variables.entry("thinking_budget").or_insert(budget.into());
            }
            if !can_reason {
                notes.ignored(field);
            }
        }
        ReasoningSettings { variables, budget: budget.map(|(_, budget)| budget).filter(|_| can_reason) }
    }
}
