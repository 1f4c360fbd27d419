//! Prompts that end within a message of the model, which the answer continues (prefill).

use crate::{ChatTemplate, Message, Prompt, RenderRequest, Role, TemplateError, Tool, ToolCallParser};

/// A rendered prompt, which may contain the start of the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// The prompt, with the start of the answer if it has one.
    pub prompt: Prompt,
    /// The byte offset in the prompt's text where the answer starts, reasoning included. The text after it is what the
    /// model would otherwise have generated; it is empty (the offset is the text's length) unless the answer continues
    /// a message or reasoning is switched off by empty reasoning.
    pub answer_start: usize,
}

impl ChatTemplate {
    /// Renders a prompt that lets the model continue the last of `messages`, if that is the assistant's: its text, or
    /// its reasoning if it has no text. The prompt ends exactly where the message ends; trailing white space is kept
    /// and no end of turn is written.
    ///
    /// If the last message is not the assistant's, the prompt ends with the header of a new answer.
    pub fn render_continued(&self, request: &RenderRequest<'_>) -> Result<RenderedPrompt, TemplateError> {
        let Some((last, before)) = request.messages.split_last().filter(|(last, _)| last.role == Role::Assistant)
        else {
            let prompt = self.render(&RenderRequest { add_generation_prompt: true, ..*request })?;
            return Ok(RenderedPrompt { answer_start: prompt.text.len(), prompt });
        };
        // A template may refuse a conversation without messages.
        let opened = self.render(&RenderRequest { messages: before, add_generation_prompt: true, ..*request });
        let reasoning = last.reasoning_content.as_deref().unwrap_or_default();
        if last.text().is_empty() && reasoning.is_empty() {
            let prompt = opened?;
            return Ok(RenderedPrompt { answer_start: prompt.text.len(), prompt });
        }
        let end = unused_character(request.messages);
        let mut marked = last.clone();
        let continued = if last.text().is_empty() { &mut marked.reasoning_content } else { &mut marked.content };
        continued.get_or_insert_default().push(end);
        let messages: Vec<_> = before.iter().chain([&marked]).cloned().collect();
        let whole = self.render(&RenderRequest { messages: &messages, add_generation_prompt: false, ..*request });
        match (whole, opened) {
            (Ok(mut prompt), opened) if prompt.text.contains(end) => {
                let at = prompt.text.rfind(end).unwrap_or(prompt.text.len());
                prompt.text.truncate(at);
                prompt.literals.retain(|&literal| literal < at);
                let answer_start = opened.map_or(at, |opened| common_prefix(&opened.text, &prompt.text));
                Ok(RenderedPrompt { prompt, answer_start })
            }
            (_, opened) => Ok(self.appended(opened?, last)),
        }
    }

    /// The header of a new answer followed by the text of `last`, for templates that do not render it.
    fn appended(&self, mut prompt: Prompt, last: &Message) -> RenderedPrompt {
        let answer_start = prompt.text.len();
        let reasoning = last.reasoning_content.as_deref().unwrap_or_default();
        if let Some(markers) = self.reasoning() {
            let begun = markers.begun_in(&prompt.text);
            if !reasoning.is_empty() && !begun {
                prompt.text += markers.start;
                prompt.text.push('\n');
            }
            self.append_text(&mut prompt, reasoning);
            if (begun || !reasoning.is_empty()) && !last.text().is_empty() {
                prompt.text.push('\n');
                prompt.text += markers.end;
                prompt.text += "\n\n";
            }
        }
        self.append_text(&mut prompt, last.text());
        RenderedPrompt { prompt, answer_start }
    }

    /// A parser for the text that the model adds to `rendered`. It has parsed the part that the prompt contains.
    pub fn continued_parser(&self, rendered: &RenderedPrompt, tools: &[Tool]) -> ToolCallParser {
        let (before, own) = rendered.prompt.text.split_at(rendered.answer_start);
        let mut parser = self.answer_parser(before, tools);
        // Trailing white space would only be held back by the parser.
        parser.push(own.trim_end());
        parser
    }
}

/// A private-use character that occurs in none of the messages.
fn unused_character(messages: &[Message]) -> char {
    let texts = || messages.iter().flat_map(|message| [&message.content, &message.reasoning_content]).flatten();
    let is_private = |c: &char| matches!(c, '\u{f0000}'..='\u{ffffd}');
    let used: std::collections::BTreeSet<char> = texts().flat_map(|text| text.chars().filter(is_private)).collect();
    ('\u{f0000}'..='\u{ffffd}').find(|c| !used.contains(c)).unwrap_or('\u{10fffd}')
}

fn common_prefix(one: &str, other: &str) -> usize {
    let same = one.chars().zip(other.chars()).take_while(|(a, b)| a == b);
    same.map(|(c, _)| c.len_utf8()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AnswerEvent;

    fn template(name: &str) -> ChatTemplate {
        let path = format!("{}/tests/data/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        let template = ChatTemplate::new(&std::fs::read_to_string(path).unwrap()).unwrap();
        template.with_token("bos_token", "<s>").with_token("eos_token", "</s>")
    }

    fn continued(template: &ChatTemplate, last: Message) -> RenderedPrompt {
        let messages = [Message::user("Hi"), last];
        template.render_continued(&RenderRequest { messages: &messages, ..Default::default() }).unwrap()
    }

    #[test]
    fn the_prompt_ends_in_the_message() {
        for (name, end) in [
            ("qwen2.5", "<|im_start|>assistant\n One, "),
            ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n One, "),
            ("qwen3.5", "<|im_start|>assistant\n<think>\n\n</think>\n\nOne, "),
            ("llama-3.1", "<|start_header_id|>assistant<|end_header_id|>\n\nOne, "),
            ("gemma-3", "<start_of_turn>model\nOne, "),
            ("gpt-oss", "<|start|>assistant<|channel|>final<|message|> One, "),
        ] {
            let template = template(name);
            let rendered = continued(&template, Message::assistant(" One, "));
            assert!(rendered.prompt.text.ends_with(end), "{name}: {:?}", rendered.prompt.text);
            let mut parser = template.continued_parser(&rendered, &[]);
            let events: Vec<_> = parser.push("two.").into_iter().chain(parser.finish()).collect();
            let content: String = events
                .into_iter()
                .map(|event| match event {
                    AnswerEvent::Content(text) => text,
                    other => panic!("{name}: {other:?}"),
                })
                .collect();
            assert_eq!(content, "two.", "{name}");
        }
    }

    #[test]
    fn reasoning_is_continued() {
        for name in ["qwen3", "qwen3.5", "deepseek-r1-distill", "gpt-oss"] {
            let template = template(name);
            let last = Message { reasoning_content: Some("Well, ".into()), ..Message::assistant("") };
            let rendered = continued(&template, last);
            assert!(rendered.prompt.text.ends_with("Well, "), "{name}: {:?}", rendered.prompt.text);
            let mut parser = template.continued_parser(&rendered, &[]);
            assert!(parser.is_reasoning(), "{name}");
            assert_eq!(parser.push("then"), [AnswerEvent::Reasoning("then".into())], "{name}");
        }
    }

    /// Every published template renders the end of the last message unchanged.
    #[test]
    fn all_templates_continue() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/templates");
        for path in std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()) {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let template = template(&name);
            // The template "python" writes no message texts.
            if name == "python" {
                continue;
            }
            let rendered = continued(&template, Message::assistant("One,\n\n  two "));
            assert!(rendered.prompt.text.ends_with("One,\n\n  two "), "{name}: {:?}", rendered.prompt.text);
            assert!(rendered.answer_start <= rendered.prompt.text.len());
        }
        let none = ChatTemplate::new(
            "{% for m in messages %}[{{ m.role }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}",
        );
        assert_eq!(continued(&none.unwrap(), Message::assistant("a")).prompt.text, "[user]>a");
    }
}
