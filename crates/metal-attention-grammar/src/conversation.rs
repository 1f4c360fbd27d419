//! [`RenderedConversation`]: a prompt with all that is needed to generate and parse its answer. The C and Python
//! bindings use it.

use std::borrow::Borrow;
use std::sync::Arc;

use metal_attention::tokenizer::Tokenizer;
use metal_attention::{Constraint, PicturePrompt, PromptBuilder, PromptSpan};
use metal_attention_chat::{
    ChatTemplate, Prompt, PromptPart, RenderRequest, RenderedPrompt, TemplateError, Tool, ToolCallParser, ToolNameError,
};

use crate::{Grammar, GrammarCompiler, GrammarError, Guide, GuideOptions, ResponseFormat};

/// A conversation that its chat template has rendered to a prompt.
pub struct RenderedConversation {
    template: ChatTemplate,
    tokenizer: Arc<Tokenizer>,
    rendered: RenderedPrompt,
    tools: Vec<Tool>,
    /// Whether the prompt ends with the header of a new answer, so that reasoning may follow.
    begins_answer: bool,
}

/// The reason why a conversation cannot be rendered, or its answer not restricted.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The chat template refuses the messages.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The model's format of tool calls cannot carry a name of a tool.
    #[error("tools: {0}")]
    Tools(#[from] ToolNameError),
    /// The grammar cannot be compiled.
    #[error("cannot be followed: {0}")]
    Grammar(#[from] GrammarError),
    /// A tool call is required, but there are no tools.
    #[error("needs tools to call, and there are none")]
    NoTools,
    /// The prompt ends within an answer that has begun, and its text need not match the grammar.
    #[error("cannot be followed by an answer that goes on with the last message")]
    Continued,
}

impl RenderedConversation {
    /// Renders a conversation. If `continued` is set, the answer continues the last message, which must be the
    /// assistant's.
    ///
    /// # Errors
    ///
    /// Returns an error if the template does, or if the model's format cannot carry calls of the tools.
    pub fn render(
        template: ChatTemplate,
        tokenizer: &Arc<Tokenizer>,
        request: &RenderRequest<'_>,
        continued: bool,
    ) -> Result<Self, ConversationError> {
        template.tool_format().check_tools(request.tools)?;
        let rendered = if continued {
            template.render_continued(request)?
        } else {
            let prompt = template.render(request)?;
            RenderedPrompt { answer_start: prompt.text.len(), prompt }
        };
        Ok(Self {
            template,
            tokenizer: Arc::clone(tokenizer),
            rendered,
            tools: request.tools.to_vec(),
            begins_answer: request.add_generation_prompt && !continued,
        })
    }

    /// The text of the prompt.
    pub fn text(&self) -> &str {
        &self.rendered.prompt.text
    }

    /// The token ids of the prompt.
    pub fn ids(&self) -> Vec<u32> {
        self.rendered.prompt.encode(&self.tokenizer)
    }

    /// The token ids and spans of the prompt with the pictures of its messages, in the order of
    /// [`take_pictures`](metal_attention_chat::take_pictures).
    pub fn with_pictures(&self, pictures: &[&PicturePrompt]) -> (Vec<u32>, Vec<PromptSpan>) {
        prompt_with_pictures(&self.rendered.prompt, pictures, &self.tokenizer)
    }

    /// The strings that end the answer, for a model without a token that does.
    pub fn stop_strings(&self) -> &'static [&'static str] {
        self.template.stop_strings()
    }

    /// The tokenizer of the model.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Whether the prompt ends within reasoning, which the answer continues.
    pub fn begins_reasoning(&self) -> bool {
        self.parser(true).is_reasoning()
    }

    /// A parser for the answer. If `has_format` is set, the answer's text has a response format and is not parsed for
    /// tool calls.
    pub fn parser(&self, has_format: bool) -> ToolCallParser {
        self.template.continued_parser(&self.rendered, if has_format { &[] } else { &self.tools })
    }

    /// Compiles the grammar of an answer whose text has the response format `format`. The JSON pointers of assertions
    /// that are not enforced are added to `left_out`.
    ///
    /// # Errors
    ///
    /// Returns an error if [`GrammarCompiler::response_format`] does, or if the prompt ends within the answer's text.
    pub fn response_format(
        &self,
        grammars: &GrammarCompiler,
        format: &ResponseFormat,
        left_out: &mut Vec<String>,
    ) -> Result<Grammar, ConversationError> {
        Ok(grammars.response_format(&self.template, self.prompt_of_grammar()?, format, left_out)?)
    }

    /// Compiles the grammar of an answer that calls a tool (with `parallel`: one or more calls). The JSON pointers of
    /// assertions that are not enforced are added to `left_out`.
    ///
    /// # Errors
    ///
    /// Returns an error if [`GrammarCompiler::calls`] does, if there are no tools, or if the prompt ends within the
    /// answer's text.
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

    /// The end of the prompt as [`GrammarCompiler`] expects it. A prompt that ends within reasoning is represented by
    /// the reasoning's start marker alone.
    fn prompt_of_grammar(&self) -> Result<&str, ConversationError> {
        match self.template.reasoning() {
            Some(markers) if self.begins_reasoning() => Ok(markers.start),
            Some(_) | None if self.rendered.answer_start < self.text().len() => Err(ConversationError::Continued),
            Some(_) | None => Ok(self.text()),
        }
    }

    /// A constraint for one answer: `grammar`, which [`response_format`](Self::response_format) or
    /// [`calls`](Self::calls) compiled, applies after the reasoning that the answer may begin with. `has_format` must
    /// be as for [`parser`](Self::parser).
    pub fn constraint(&self, grammar: Grammar, has_format: bool) -> Option<Box<dyn Constraint>> {
        let has_ended_reasoning = self.template.reasoning().is_some_and(|markers| markers.ended_in(self.text()));
        let guide = Guide::new(
            &self.tokenizer,
            GuideOptions {
                template: &self.template,
                parser: self.parser(has_format),
                grammar: Some(grammar),
                budget: None,
                single_call: false,
                has_tools: !has_format && !self.tools.is_empty(),
                may_begin_reasoning: self.begins_answer && !has_ended_reasoning,
            },
        );
        guide.map(|guide| Box::new(guide) as Box<dyn Constraint>)
    }
}

/// The token ids and spans of a rendered prompt, in which markers with numbers stand for `pictures`.
pub fn prompt_with_pictures<P: Borrow<PicturePrompt>>(
    prompt: &Prompt,
    pictures: &[P],
    tokenizer: &Tokenizer,
) -> (Vec<u32>, Vec<PromptSpan>) {
    let mut builder = PromptBuilder::new(tokenizer);
    for part in prompt.parts(pictures.len()) {
        match part {
            PromptPart::Text(text, literals) => builder.text(text, &literals),
            PromptPart::Picture(number) => builder.picture(pictures[number].borrow()),
        }
    }
    builder.finish()
}

#[cfg(test)]
mod tests {
    use metal_attention::Model;
    use metal_attention_chat::Message;
    use serde_json::json;

    use super::*;
    use crate::encode_continuation;

    fn conversation(messages: &[Message], tools: &[Tool], continued: bool) -> RenderedConversation {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../metal-attention-chat/tests/data/templates");
        let template = ChatTemplate::new(&std::fs::read_to_string(format!("{folder}/qwen3.jinja")).unwrap()).unwrap();
        let tokenizer = Model::built_in().unwrap().tokenizer().unwrap();
        let request = RenderRequest { messages, tools, add_generation_prompt: true, ..Default::default() };
        RenderedConversation::render(template, &tokenizer, &request, continued).unwrap()
    }

    /// Whether an answer may be `text`, and is complete then.
    fn follows(conversation: &RenderedConversation, grammar: &Grammar, has_format: bool, text: &str) -> bool {
        let tokenizer = conversation.tokenizer();
        let mut constraint = conversation.constraint(grammar.clone(), has_format).unwrap();
        let may_come = encode_continuation(tokenizer, text, true).into_iter().all(|id| {
            let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
            constraint.allowed(&mut mask).unwrap();
            mask[id as usize / 32] & (1 << (id % 32)) != 0 && constraint.accept(id).is_ok()
        });
        may_come && constraint.is_complete()
    }

    #[test]
    fn answers_have_their_form_after_reasoning() {
        let chat = conversation(&[Message::user("Question?")], &[], false);
        let grammars = GrammarCompiler::new(chat.tokenizer());
        let format = ResponseFormat::Choice(vec!["yes".into(), "no".into()]);
        let grammar = chat.response_format(&grammars, &format, &mut Vec::new()).unwrap();
        for text in ["yes", "no", "<think>Hm.</think>yes", "<think>\nHm.\n</think>\n\nno"] {
            assert!(follows(&chat, &grammar, true, text), "{text}");
        }
        for text in ["Hm.", "<think>yes", "<think></think>Hm."] {
            assert!(!follows(&chat, &grammar, true, text), "{text}");
        }
        assert!(matches!(chat.calls(&grammars, true, &mut Vec::new()), Err(ConversationError::NoTools)));
        let begun = conversation(&[Message::user("Question?"), Message::assistant("y")], &[], true);
        assert!(matches!(
            begun.response_format(&grammars, &format, &mut Vec::new()),
            Err(ConversationError::Continued)
        ));
    }

    #[test]
    fn required_calls_are_enforced() {
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
