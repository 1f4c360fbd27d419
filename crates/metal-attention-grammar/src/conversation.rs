//! A conversation as a prompt, and what reads and restricts its answer.

use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention::tokenizer::Tokenizer;
use metal_attention_chat::{
    ChatTemplate, Continuation, RenderRequest, TemplateError, Tool, ToolCallParser, ToolNameError,
};

use crate::{AnswerForm, Grammar, GrammarCompiler, GrammarError, Guide, GuideOptions};

/// A conversation as its template has rendered it.
pub struct RenderedConversation {
    template: ChatTemplate,
    tokenizer: Arc<Tokenizer>,
    continuation: Continuation,
    tools: Vec<Tool>,
    /// The prompt ends with what begins an answer.
    begins_answer: bool,
}

/// Why a conversation has no prompt, or its answer no grammar.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The template refuses the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The model cannot write calls of a tool.
    #[error("tools: {0}")]
    Tools(#[from] ToolNameError),
    /// No grammar can be made.
    #[error("cannot be followed: {0}")]
    Grammar(#[from] GrammarError),
    /// A call must come, but there are no tools.
    #[error("needs tools to call, and there are none")]
    NoTools,
    /// What is there of the answer may be no beginning of its form.
    #[error("cannot be followed by an answer that goes on with the last message")]
    Continued,
}

impl RenderedConversation {
    /// Renders a conversation; `continued`: the answer goes on with its last message, which is the assistant's.
    ///
    /// # Errors
    ///
    /// Fails where the template does, and for tools whose calls the model cannot write.
    pub fn render(
        template: ChatTemplate,
        tokenizer: &Arc<Tokenizer>,
        request: &RenderRequest<'_>,
        continued: bool,
    ) -> Result<Self, ConversationError> {
        template.tool_format().check_tools(request.tools)?;
        let continuation = if continued {
            template.render_continued(request)?
        } else {
            let prompt = template.render(request)?;
            Continuation { begin: prompt.text.len(), prompt }
        };
        Ok(Self {
            template,
            tokenizer: Arc::clone(tokenizer),
            continuation,
            tools: request.tools.to_vec(),
            begins_answer: request.add_generation_prompt && !continued,
        })
    }

    /// The prompt's text.
    pub fn text(&self) -> &str {
        &self.continuation.prompt.text
    }

    /// The prompt's token ids.
    pub fn ids(&self) -> Vec<u32> {
        self.continuation.prompt.encode(&self.tokenizer)
    }

    /// Strings that end the answer where the model has no token for it.
    pub fn stop_strings(&self) -> &'static [&'static str] {
        self.template.stop_strings()
    }

    /// What spells the answer's tokens.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Whether the prompt ends in thoughts, which the answer goes on with.
    pub fn begins_thoughts(&self) -> bool {
        self.parser(true).is_thinking()
    }

    /// Takes the answer apart. One that `has_form`, a form of its own, has no calls.
    pub fn parser(&self, has_form: bool) -> ToolCallParser {
        self.template.continued_parser(&self.continuation, if has_form { &[] } else { &self.tools })
    }

    /// The grammar of an answer whose text looks like `form`. `left_out` gets the places of what is not enforced.
    ///
    /// # Errors
    ///
    /// Fails where [`GrammarCompiler::form`] does, and where the answer has begun.
    pub fn form(
        &self,
        grammars: &GrammarCompiler,
        form: &AnswerForm,
        left_out: &mut Vec<String>,
    ) -> Result<Grammar, ConversationError> {
        Ok(grammars.form(&self.template, self.prompt_of_grammar()?, form, left_out)?)
    }

    /// The grammar of an answer that calls a tool; `parallel`: or several. `left_out` gets the places of what is not enforced.
    ///
    /// # Errors
    ///
    /// Fails where [`GrammarCompiler::calls`] does, where there are no tools, and where the answer has begun.
    pub fn calls(
        &self,
        grammars: &GrammarCompiler,
        parallel: bool,
        left_out: &mut Vec<String>,
    ) -> Result<Grammar, ConversationError> {
        if self.tools.is_empty() {
            return Err(ConversationError::NoTools);
        }
        Ok(grammars.calls(&self.template, self.prompt_of_grammar()?, &self.tools, parallel, left_out)?)
    }

    /// The prompt as a grammar has to know it: one that ends in thoughts which have begun before is as one that begins them.
    fn prompt_of_grammar(&self) -> Result<&str, ConversationError> {
        let thinks = self.begins_thoughts();
        match self.template.reasoning() {
            Some(markers) if thinks => Ok(markers.start),
            Some(_) | None if self.continuation.begin < self.text().len() => Err(ConversationError::Continued),
            Some(_) | None => Ok(self.text()),
        }
    }

    /// Restricts one answer to `grammar`, which [`form`](Self::form) or [`calls`](Self::calls) made, after thoughts where the model
    /// begins with some.
    pub fn constraint(&self, grammar: Grammar, has_form: bool) -> Option<Box<dyn Constraint>> {
        let has_thought = self.template.reasoning().is_some_and(|markers| markers.ended_in(self.text()));
        let guide = Guide::new(
            &self.tokenizer,
            GuideOptions {
                template: &self.template,
                parser: self.parser(has_form),
                grammar: Some(grammar),
                budget: None,
                single_call: false,
                has_tools: !has_form && !self.tools.is_empty(),
                may_think: self.begins_answer && !has_thought,
            },
        );
        guide.map(|guide| Box::new(guide) as Box<dyn Constraint>)
    }
}

#[cfg(test)]
mod tests {
    use metal_attention::Model;
    use metal_attention_chat::Message;
    use serde_json::json;

    use super::*;
    use crate::tokens_within;

    fn conversation(messages: &[Message], tools: &[Tool], continued: bool) -> RenderedConversation {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../metal-attention-chat/tests/data/templates");
        let template = ChatTemplate::new(&std::fs::read_to_string(format!("{folder}/qwen3.jinja")).unwrap()).unwrap();
        let tokenizer = Model::built_in().unwrap().tokenizer().unwrap();
        let request = RenderRequest { messages, tools, add_generation_prompt: true, ..Default::default() };
        RenderedConversation::render(template, &tokenizer, &request, continued).unwrap()
    }

    /// Whether an answer may be `text`, and nothing more.
    fn follows(conversation: &RenderedConversation, grammar: &Grammar, has_form: bool, text: &str) -> bool {
        let tokenizer = conversation.tokenizer();
        let mut constraint = conversation.constraint(grammar.clone(), has_form).unwrap();
        let may_come = tokens_within(tokenizer, text, true).into_iter().all(|id| {
            let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
            constraint.allowed(&mut mask).unwrap();
            mask[id as usize / 32] & (1 << (id % 32)) != 0 && constraint.accept(id).is_ok()
        });
        may_come && constraint.is_complete()
    }

    #[test]
    fn answers_have_their_form_after_thoughts() {
        let chat = conversation(&[Message::user("Question?")], &[], false);
        let grammars = GrammarCompiler::new(chat.tokenizer());
        let form = AnswerForm::Choice(vec!["yes".into(), "no".into()]);
        let grammar = chat.form(&grammars, &form, &mut Vec::new()).unwrap();
        for text in ["yes", "no", "<think>Hm.</think>yes", "<think>\nHm.\n</think>\n\nno"] {
            assert!(follows(&chat, &grammar, true, text), "{text}");
        }
        for text in ["Hm.", "<think>yes", "<think></think>Hm."] {
            assert!(!follows(&chat, &grammar, true, text), "{text}");
        }
        assert!(matches!(chat.calls(&grammars, true, &mut Vec::new()), Err(ConversationError::NoTools)));
        let begun = conversation(&[Message::user("Question?"), Message::assistant("y")], &[], true);
        assert!(matches!(begun.form(&grammars, &form, &mut Vec::new()), Err(ConversationError::Continued)));
    }

    #[test]
    fn answers_are_calls_where_they_must_be() {
        let tools = [Tool::try_from(json!({"type": "function", "function": {"name": "f"}})).unwrap()];
        let chat = conversation(&[Message::user("Question?")], &tools, false);
        let grammar = chat.calls(&GrammarCompiler::new(chat.tokenizer()), false, &mut Vec::new()).unwrap();
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
        assert!(follows(&chat, &grammar, false, call) && !follows(&chat, &grammar, false, "Hm."));
        let mut parser = chat.parser(false);
        parser.push(call);
        parser.finish();
        assert_eq!(parser.n_calls(), 1);
        let mut parser = chat.parser(true);
        parser.push(call);
        parser.finish();
        assert_eq!(parser.n_calls(), 0);
    }
}
