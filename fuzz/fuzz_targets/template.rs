//! Fuzz target of chat templates. The input is a template and, after a NUL character, a message. Compiling and rendering must
//! terminate without a panic, and the prompt must not exceed the limit.
#![no_main]

use libfuzzer_sys::fuzz_target;
use metal_attention_chat::{ChatTemplate, Message, RenderRequest, TemplateError};

fuzz_target!(|data: &str| {
    let (source, content) = data.split_once('\0').unwrap_or((data, "Hello!"));
    let Ok(template) = ChatTemplate::new(source) else { return };
    let messages = [Message::system("Be brief."), Message::user(content)];
    let request = RenderRequest { messages: &messages, add_generation_prompt: true, ..Default::default() };
    match template.render(&request) {
        Ok(prompt) => assert!(prompt.text.len() <= 32 << 20),
        Err(TemplateError::Render { message }) => assert!(!message.contains("has a fault"), "{message}"),
        Err(_) => {}
    }
});
