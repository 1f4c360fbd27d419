//! Architectures that are known but not supported yet, with the reason.

/// The missing part of each of these architectures.
#[rustfmt::skip]
const MISSING: &[(&[&str], &str)] = &[
    (&["kimi-k3", "glm5-next", "bailingmoe3", "qwen4exp"], "layers with a recurrent state (gated delta rule)"),
    (&["minimax-01"], "layers with a recurrent state (lightning attention)"),
    (&["t5"], "attention from one text to another"),
    (&["t5encoder"], "learned biases of distances"),
    (&["deepseek32", "deepseek4", "deepseek41", "dots3note", "glm-dsa", "hy_v4", "minimax-m3"], "sparse attention by an indexer"),
    (&["mimo2", "plamo3"], "values of another length than keys"),
    (&["deci"], "layers without attention or feed-forward"),
    (&["dream", "llada", "llada-moe", "rnd1"], "writing by diffusion"),
    (&["apertus"], "the activation xIELU"),
    (&["maple"], "a SwiGLU that is cut off before its activation"),
    (&["granite_swa"], "windows and rotations by two patterns of their own, with sinks"),
    (&["graniteswitch"], "LoRA adapters that tokens of the text activate"),
    (&["hrm_text"], "two stacks of layers that are run in cycles"),
    (&["talkie"], "norms without weights, and the embedding that each layer adds again"),
    (&["smallthinker", "arctic", "grovemoe", "cohere2moe"], "its way to join experts with the rest of the layer"),
    (&["bitnet"], "norms inside attention and feed-forward"),
    (&["nanbeige"], "layers that are gone through several times"),
    (&["chameleon", "cogvlm"], "pictures among the text"),
    (&["clip", "wavtokenizer-dec", "qwen3tts", "pockettts"], "pictures and sounds"),
    (&["gptj"], "a definition of its files: llama.cpp has the name, but runs no such model"),
];

/// Drafters in files of their own, which are no models by themselves.
pub(super) const DRAFTERS: [&str; 3] = ["dflash", "eagle3", "gemma4-assistant"];

/// The missing part of `architecture`, if it is a known one.
pub(super) fn part(architecture: &str) -> Option<&'static str> {
    MISSING.iter().find(|(names, _)| names.contains(&architecture)).map(|(_, part)| *part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supported_architectures_are_not_missing() {
        let known: Vec<_> = MISSING.iter().flat_map(|(names, _)| *names).chain(&DRAFTERS).collect();
        assert!(known.iter().all(|name| super::super::names().all(|there| there != **name)));
        assert!(known.iter().enumerate().all(|(i, name)| !known[..i].contains(name)), "{known:?}");
        assert_eq!(part("t5"), Some("attention from one text to another"));
        assert_eq!(part("gpt-17"), None);
    }
}
