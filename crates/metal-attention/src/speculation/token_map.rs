//! The tokens of one vocabulary in another one, by their texts.

use std::collections::HashMap;
use std::str;

use metal_attention_tokenizer::{EncodeOptions, Tokenizer};

use super::DraftModelError;

/// The smallest part of the smaller vocabulary that both must share.
const MIN_SHARED: f64 = 0.1;

/// Stands for a token that the other vocabulary lacks.
const NONE: u32 = u32::MAX;

/// How the tokens of a target and of its draft model correspond.
#[derive(Debug)]
pub(super) enum TokenMap {
    /// All tokens have the same ids, `0..n_vocab`.
    Same { n_vocab: u32 },
    /// Tokens correspond by their texts.
    ByText(Box<TextMap>),
}

/// The tables of [`TokenMap::ByText`].
#[derive(Debug)]
pub(super) struct TextMap {
    /// The draft model's tokens for the text of all tokens of the target, in order.
    to_draft: Vec<u32>,
    /// Where those of each token of the target end, `[n_vocab of the target]`.
    ends: Vec<u32>,
    /// The token of the target for each token of the draft model, `[n_vocab of the draft model]`; [`NONE`] if it has none.
    to_target: Vec<u32>,
    /// BOS of the draft model, if its texts begin with it.
    bos: Option<u32>,
}

impl TokenMap {
    /// Compares two vocabularies. An error if they share nearly nothing.
    pub fn new(target: &Tokenizer, draft: &Tokenizer) -> Result<Self, DraftModelError> {
        let n_vocab = target.n_vocab() as u32;
        let same = |id| {
            target.token_text(id) == draft.token_text(id)
                && target.is_control(id) == draft.is_control(id)
                && target.token_bytes(id) == draft.token_bytes(id)
        };
        if target.n_vocab() == draft.n_vocab() && (0..n_vocab).all(same) {
            return Ok(Self::Same { n_vocab });
        }
        TextMap::new(target, draft).map(|map| Self::ByText(Box::new(map)))
    }

    /// Appends the draft model's tokens for token `id` of the target: one, several if it is divided there, none if it has no
    /// text or is a control token that the draft model lacks. `first`: it is the first one of its sequence.
    pub fn to_draft(&self, id: u32, first: bool, out: &mut Vec<u32>) {
        match self {
            Self::Same { n_vocab } => out.extend(Some(id).filter(|id| id < n_vocab)),
            Self::ByText(map) => {
                let ids = map.of_target(id);
                out.extend(map.bos.filter(|bos| first && ids.first() != Some(bos)));
                out.extend(ids);
            }
        }
    }

    /// The target's token for token `id` of the draft model; `None` if the target lacks it.
    pub fn to_target(&self, id: u32) -> Option<u32> {
        match self {
            Self::Same { n_vocab } => Some(id).filter(|id| id < n_vocab),
            Self::ByText(map) => map.to_target.get(id as usize).copied().filter(|&id| id != NONE),
        }
    }

    /// Bytes of the tables.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Same { .. } => 0,
            Self::ByText(map) => {
                size_of::<u32>() * (map.to_draft.capacity() + map.ends.capacity() + map.to_target.capacity())
            }
        }
    }
}

impl TextMap {
    fn new(target: &Tokenizer, draft: &Tokenizer) -> Result<Self, DraftModelError> {
        let (of_target, of_draft) = (Texts::new(target), Texts::new(draft));
        let mut map = Self {
            to_draft: Vec::with_capacity(target.n_vocab()),
            ends: Vec::with_capacity(target.n_vocab()),
            to_target: (0..draft.n_vocab() as u32)
                .map(|id| of_target.counterpart(&of_draft, id).unwrap_or(NONE))
                .collect(),
            bos: draft.bos().filter(|_| draft.adds_bos()),
        };
        let mut n_shared = 0;
        for id in 0..target.n_vocab() as u32 {
            match of_draft.counterpart(&of_target, id) {
                Some(other) => {
                    n_shared += usize::from(!target.token_bytes(id).is_empty());
                    map.to_draft.push(other);
                }
                None => of_draft.encode(target.token_bytes(id), &mut map.to_draft),
            }
            map.ends.push(map.to_draft.len() as u32);
        }
        let (n_target, n_draft) = (of_target.n_with_text(), of_draft.n_with_text());
        if (n_shared as f64) < MIN_SHARED * n_target.min(n_draft) as f64 || n_shared == 0 {
            return Err(DraftModelError::OtherVocabulary { n_shared, n_target, n_draft });
        }
        Ok(map)
    }

    /// The draft model's tokens for a token of the target.
    fn of_target(&self, id: u32) -> &[u32] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.to_draft[start as usize..end as usize]
    }
}

/// The tokens of a vocabulary by their texts.
struct Texts<'a> {
    tokenizer: &'a Tokenizer,
    /// Of the tokens that decode to some bytes, the one for these bytes.
    by_bytes: HashMap<&'a [u8], u32>,
    /// The length in bytes of the longest one.
    longest: usize,
}

impl<'a> Texts<'a> {
    fn new(tokenizer: &'a Tokenizer) -> Self {
        let mut by_bytes = HashMap::with_capacity(tokenizer.n_vocab());
        for id in 0..tokenizer.n_vocab() as u32 {
            let bytes = tokenizer.token_bytes(id);
            if !bytes.is_empty() {
                // Byte-fallback tokens are for texts that no other token covers.
                by_bytes
                    .entry(bytes)
                    .and_modify(|known| {
                        if is_byte(tokenizer, *known) {
                            *known = id;
                        }
                    })
                    .or_insert(id);
            }
        }
        let longest = by_bytes.keys().map(|bytes| bytes.len()).max().unwrap_or(0);
        Self { tokenizer, by_bytes, longest }
    }

    /// The number of tokens that decode to some bytes.
    fn n_with_text(&self) -> usize {
        (0..self.tokenizer.n_vocab() as u32).filter(|&id| !self.tokenizer.token_bytes(id).is_empty()).count()
    }

    /// The token of this vocabulary for token `id` of `other`: that of the same spelling and kind, or else that of the same
    /// bytes. For BOS and EOS, or else that of the same role.
    fn counterpart(&self, other: &Texts<'_>, id: u32) -> Option<u32> {
        let (own, other) = (self.tokenizer, other.tokenizer);
        let bytes = other.token_bytes(id);
        let same = |&own_id: &u32| own.is_control(own_id) == other.is_control(id) && own.token_bytes(own_id) == bytes;
        let by_spelling = other.token_text(id).and_then(|text| own.token_id(text)).filter(same);
        let by_role = || {
            let roles = [(other.bos(), own.bos()), (other.eos(), own.eos())];
            roles.into_iter().find(|(role, _)| *role == Some(id)).and_then(|(_, own)| own)
        };
        by_spelling.or_else(|| self.by_bytes.get(bytes).copied()).or_else(by_role)
    }

    /// Appends tokens that decode to exactly `bytes`: those of the tokenizer if they do, or else the longest that fit, one after
    /// another; none if there is no such division.
    fn encode(&self, bytes: &[u8], out: &mut Vec<u32>) {
        let text = str::from_utf8(bytes).unwrap_or_default();
        // The encoder may put a blank before the text.
        for text in [Some(text), text.strip_prefix(' ')].into_iter().flatten().filter(|text| !text.is_empty()) {
            let ids = self.tokenizer.encode(text, EncodeOptions::default());
            if ids.iter().flat_map(|&id| self.tokenizer.token_bytes(id)).eq(bytes) {
                out.extend(ids);
                return;
            }
        }
        let (n_before, mut rest) = (out.len(), bytes);
        while !rest.is_empty() {
            let longest = rest.len().min(self.longest);
            let Some((n, &id)) = (1..=longest).rev().find_map(|n| Some((n, self.by_bytes.get(&rest[..n])?))) else {
                out.truncate(n_before);
                return;
            };
            out.push(id);
            rest = &rest[n..];
        }
    }
}

/// Whether a token is spelled as those for single bytes are, such as `<0x0A>`.
fn is_byte(tokenizer: &Tokenizer, id: u32) -> bool {
    let text = tokenizer.token_text(id).unwrap_or_default();
    text.len() == "<0x0A>".len() && text.starts_with("<0x") && text.ends_with('>')
}

#[cfg(test)]
mod tests {
    use metal_attention_gguf::{GgufFile, Metadata, StringArray};
    use metal_attention_tokenizer::TokenizerOptions;

    use super::*;

    fn cut(name: &str) -> Tokenizer {
        let file = GgufFile::from_bytes(&metal_attention_testing::vocabulary::bytes(name)).unwrap();
        Tokenizer::from_metadata(file.metadata(), &TokenizerOptions::default()).unwrap()
    }

    /// The vocabulary of a model that spells the blank "▁", with BOS and EOS before `tokens`.
    fn of_tokens(tokens: &[&str], add_bos: bool) -> Tokenizer {
        let texts: StringArray = ["<unk>", "<s>", "</s>"].iter().chain(tokens).map(|&text| text.to_owned()).collect();
        let types: Vec<i32> =
            [2, 3, 3].into_iter().chain(tokens.iter().map(|text| if text.starts_with("<|") { 3 } else { 1 })).collect();
        let mut metadata = Metadata::new();
        metadata.set("tokenizer.ggml.model", "llama");
        metadata.set(
            "tokenizer.ggml.scores",
            metal_attention_gguf::Value::Array(metal_attention_gguf::Array::F32(vec![0.0; types.len()])),
        );
        metadata.set("tokenizer.ggml.tokens", texts);
        metadata.set("tokenizer.ggml.token_type", types);
        metadata.set("tokenizer.ggml.add_bos_token", add_bos);
        Tokenizer::from_metadata(&metadata, &TokenizerOptions::default()).unwrap()
    }

    fn in_draft(map: &TokenMap, ids: &[u32]) -> Vec<u32> {
        let mut out = Vec::new();
        for (i, &id) in ids.iter().enumerate() {
            map.to_draft(id, i == 0, &mut out);
        }
        out
    }

    #[test]
    fn equal_vocabularies_share_their_ids() {
        let tokens = of_tokens(&["a", "b"], true);
        let map = TokenMap::new(&tokens, &of_tokens(&["a", "b"], true)).unwrap();
        assert!(matches!(map, TokenMap::Same { n_vocab: 5 }));
        assert_eq!(in_draft(&map, &[3, 1, 4]), [3, 1, 4], "BOS is not added");
        assert_eq!((map.to_target(4), map.to_target(5), map.bytes()), (Some(4), None, 0));
        // One more token: nothing but that differs.
        let map = TokenMap::new(&tokens, &of_tokens(&["a", "b", "c"], true)).unwrap();
        assert_eq!(in_draft(&map, &[1, 3, 4]), [1, 3, 4]);
        assert_eq!((map.to_target(4), map.to_target(5)), (Some(4), None));
    }

    #[test]
    fn tokens_correspond_by_text_kind_and_role() {
        let target = of_tokens(&["▁ab", "b", "a", "<|user|>", "<|end|>", "abc", "z"], true);
        let draft = of_tokens(&["a", "b", "▁ab", "c", "<|end|>", "▁"], true);
        let map = TokenMap::new(&target, &draft).unwrap();
        // BOS and EOS; "▁ab", "b" and "a"; no "<|user|>"; "<|end|>"; "abc" divided; no "z".
        let ids = [1, 2, 3, 4, 5, 6, 7, 8, 9];
        assert_eq!(in_draft(&map, &ids), [1, 2, 5, 4, 3, 7, 3, 4, 6]);
        let back: Vec<_> = (0..9).map(|id| map.to_target(id)).collect();
        assert_eq!(back, [Some(0), Some(1), Some(2), Some(5), Some(4), Some(3), None, Some(7), None]);
        // The draft model's texts begin with BOS, whether the target's do or not.
        assert_eq!(in_draft(&map, &[5, 5]), [1, 3, 3]);
        assert_eq!(in_draft(&TokenMap::new(&target, &of_tokens(&["b", "a"], false)).unwrap(), &[5, 5]), [4, 4]);
        assert_eq!((in_draft(&map, &[99]), map.to_target(99)), (vec![1], None), "no such token");
    }

    #[test]
    fn a_token_that_is_divided_keeps_its_bytes() {
        let names = ["gpt-2-cut.gguf", "llama-bpe-cut.gguf", "llama-spm-cut.gguf", "gemma-4-cut.gguf", "rwkv-cut.gguf"];
        let mut n_divided = Vec::new();
        for name in names {
            let (target, draft) = (cut(name), cut("llama-spm-cut.gguf"));
            let map = TokenMap::new(&target, &draft).unwrap();
            let mut n = 0;
            for id in 0..target.n_vocab() as u32 {
                let mut ids = Vec::new();
                map.to_draft(id, false, &mut ids);
                n += usize::from(ids.len() > 1);
                let bytes: Vec<u8> = ids.iter().flat_map(|&id| draft.token_bytes(id)).copied().collect();
                assert_eq!(bytes, target.token_bytes(id), "{name}: {:?} is {ids:?}", target.token_text(id));
                if let [one] = ids[..]
                    && !target.is_control(id)
                {
                    let back = map.to_target(one).expect("the token itself or one of the same text");
                    assert_eq!(target.token_bytes(back), target.token_bytes(id), "{name}: {id}");
                }
            }
            n_divided.push(n);
        }
        assert_eq!(n_divided, [2583, 2205, 0, 2180, 2935]);
    }

    #[test]
    fn vocabularies_without_common_tokens_are_refused() {
        let (target, draft) = (of_tokens(&["a", "b", "c"], true), of_tokens(&["x", "y"], true));
        let error = TokenMap::new(&target, &draft).unwrap_err();
        assert!(matches!(error, DraftModelError::OtherVocabulary { n_shared: 0, n_target: 3, n_draft: 2 }), "{error}");
        assert_eq!(
            error.to_string(),
            "the draft model's vocabulary is another one: only 0 tokens have the same text, of 2 in the draft model and 3 in the \
             model, so that its drafts could not hold: use a smaller model of the same family"
        );
    }
}
