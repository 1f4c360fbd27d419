//! Rerankers: how a query and a document become one token sequence, and which output is the score.

use std::sync::Arc;

use metal_attention_tokenizer::{EncodeOptions, Tokenizer};

use crate::{Error, Model, Pooling};

/// Metadata key of the template that joins a query and a document.
const TEMPLATE: &str = "tokenizer.chat_template.rerank";

/// Maximum placeholders of a template: each one is replaced by a text of the caller.
const MAX_PLACEHOLDERS: usize = 16;

/// Why a model cannot be used as a reranker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RerankError {
    /// The file does not declare a ranking model, or has no classifier.
    #[error(
        "the model is no reranker: its file has no pooling_type 4 (rank) with a classifier; models of embeddings tell how near \
         texts are by the cosine of their embeddings (`embed`, /v1/embeddings)"
    )]
    NoReranker,
    /// The file has neither EOS nor SEP, and no template.
    #[error(
        "the reranker's file does not say how a query and a document become one text: it has neither an EOS or SEP token nor \
         {TEMPLATE}"
    )]
    NoSeparator,
    /// The template is invalid.
    #[error("the reranker's {TEMPLATE} {why}")]
    Template {
        /// The reason.
        why: &'static str,
    },
}

/// Makes one token sequence of a query and a document, and selects the score among the model's outputs.
///
/// If the file has `tokenizer.chat_template.rerank`, the sequence is that template with `{query}` and `{document}`
/// replaced. Control tokens are recognised in the template only: a query or a document that spells one is plain text.
/// Otherwise the tokens are joined as the family was trained: `[CLS] query [SEP] document [SEP]` (BERT),
/// `<s> query </s></s> document </s>` (XLM-RoBERTa).
///
/// The outputs come from [`Pooler`](crate::Pooler).
#[derive(Debug, Clone)]
pub struct Reranker {
    /// Tokenizer of the model.
    tokenizer: Arc<Tokenizer>,
    /// The format of a pair.
    form: PairFormat,
    /// Index of the output that is the score.
    score: usize,
}

/// The format in which a query and a document become one token sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PairFormat {
    /// A template.
    Template(Vec<TemplatePart>),
    /// Query and document with tokens before, between and after them.
    Tokens { begin: Option<u32>, between: Vec<u32>, end: u32 },
}

/// A part of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TemplatePart {
    /// Text of the template.
    Text(String),
    /// The query.
    Query,
    /// The document.
    Document,
}

impl Reranker {
    /// The reranker of `model`; an error if it is none.
    pub fn new(model: &Model) -> Result<Self, Error> {
        let output = &model.spec().output;
        let classifier = output.classifier.as_ref().filter(|_| output.pooling == Some(Pooling::Classifier));
        let classifier = classifier.ok_or(RerankError::NoReranker)?;
        let yes = classifier.labels.iter().position(|label| label.eq_ignore_ascii_case("yes"));
        let tokenizer = model.tokenizer()?;
        let form = match model.gguf().metadata().str(TEMPLATE)? {
            Some(template) => PairFormat::Template(parts(template)?),
            None => tokens(&tokenizer)?,
        };
        Ok(Self { tokenizer, form, score: yes.unwrap_or(0) })
    }

    /// The token ids of a query and a document as one sequence.
    pub fn encode(&self, query: &str, document: &str) -> Vec<u32> {
        match &self.form {
            PairFormat::Template(parts) => encode_template(&self.tokenizer, parts, query, document),
            PairFormat::Tokens { begin, between, end } => {
                let encode = |text| self.tokenizer.encode(text, EncodeOptions::default());
                let mut ids: Vec<u32> = begin.iter().copied().collect();
                ids.extend(encode(query));
                ids.extend(between);
                ids.extend(encode(document));
                ids.push(*end);
                ids
            }
        }
    }

    /// The score among the outputs of a sequence: that of the label `yes` if the file has one, otherwise the first. NaN
    /// if `outputs` is empty. It is a probability only if the model computes one.
    pub fn score(&self, outputs: &[f32]) -> f32 {
        outputs.get(self.score).copied().unwrap_or(f32::NAN)
    }
}

/// The indices of `scores`, highest first. Equal scores keep their order; NaN comes last.
pub fn best_first(scores: &[f32]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    let key = |i: usize| if scores[i].is_nan() { f32::NEG_INFINITY } else { scores[i] };
    order.sort_by(|&a, &b| key(b).total_cmp(&key(a)));
    order
}

/// Parses a template.
fn parts(mut template: &str) -> Result<Vec<TemplatePart>, RerankError> {
    let mut parts = Vec::new();
    while !template.is_empty() {
        let found = [("{query}", TemplatePart::Query), ("{document}", TemplatePart::Document)];
        let found = found.into_iter().filter_map(|(name, part)| Some((template.find(name)?, name.len(), part)));
        let (start, len, part) = found
            .min_by_key(|(start, ..)| *start)
            .map_or((template.len(), 0, None), |found| (found.0, found.1, Some(found.2)));
        if start > 0 {
            parts.push(TemplatePart::Text(template[..start].to_owned()));
        }
        parts.extend(part);
        template = &template[start + len..];
    }
    let error = |why| Err(RerankError::Template { why });
    if !parts.contains(&TemplatePart::Query) || !parts.contains(&TemplatePart::Document) {
        return error("lacks {query} or {document}");
    }
    if parts.iter().filter(|part| !matches!(part, TemplatePart::Text(_))).count() > MAX_PLACEHOLDERS {
        return error("has {query} and {document} more than 16 times");
    }
    Ok(parts)
}

/// The format of a model without a template.
fn tokens(tokenizer: &Tokenizer) -> Result<PairFormat, RerankError> {
    let begin = tokenizer.bos().filter(|_| tokenizer.adds_bos());
    let (eos, separator) = (tokenizer.eos(), tokenizer.separator());
    if tokenizer.model() == "bert"
        && let Some(separator) = separator
    {
        // BERT's sequences end with SEP, whatever token the file names as EOS.
        return Ok(PairFormat::Tokens { begin, between: vec![separator], end: separator });
    }
    let end = eos.or(separator).ok_or(RerankError::NoSeparator)?;
    let again = separator.filter(|_| eos.is_some() && tokenizer.adds_separator());
    Ok(PairFormat::Tokens { begin, between: [end].into_iter().chain(again).collect(), end })
}

/// Fills in a template and encodes it.
fn encode_template(tokenizer: &Tokenizer, parts: &[TemplatePart], query: &str, document: &str) -> Vec<u32> {
    let mut text = String::new();
    let mut foreign = Vec::new();
    for part in parts {
        let start = text.len();
        match part {
            TemplatePart::Text(literal) => {
                text += literal;
                continue;
            }
            TemplatePart::Query => text += query,
            TemplatePart::Document => text += document,
        }
        foreign.push(start..text.len());
    }
    // Positions at which no control token may start: everywhere in the caller's texts, and where one of the template
    // would reach into them.
    let starts = tokenizer.control_starts(&text);
    let mut literals: Vec<usize> =
        starts.into_iter().filter(|at| foreign.iter().any(|range| range.contains(at))).collect();
    literals.extend(foreign.iter().filter(|range| !range.is_empty()).map(|range| range.start));
    literals.sort_unstable();
    literals.dedup();
    tokenizer.encode_with_literals(&text, &literals, EncodeOptions { add_special: false, parse_special: true })
}

#[cfg(test)]
mod tests {
    use metal_attention_gguf::{Array, GgufFile, Metadata, Value};
    use metal_attention_tokenizer::TokenizerOptions;

    use super::*;

    fn vocabulary(name: &str) -> Metadata {
        GgufFile::from_bytes(&metal_attention_testing::vocabulary::bytes(&format!("{name}-cut.gguf")))
            .unwrap()
            .metadata()
            .clone()
    }

    fn reranker(metadata: &Metadata, template: Option<&str>) -> Result<Reranker, RerankError> {
        let tokenizer = Arc::new(Tokenizer::from_metadata(metadata, &TokenizerOptions::default()).unwrap());
        let form = match template {
            Some(template) => PairFormat::Template(parts(template)?),
            None => tokens(&tokenizer)?,
        };
        Ok(Reranker { tokenizer, form, score: 0 })
    }

    /// The encoded pair, spelled in tokens.
    fn spelt(reranker: &Reranker, query: &str, document: &str) -> String {
        let ids = reranker.encode(query, document);
        ids.iter().map(|&id| reranker.tokenizer.token_text(id).unwrap()).collect::<Vec<_>>().join(" ")
    }

    /// A vocabulary like XLM-RoBERTa's.
    fn xlm_roberta() -> Metadata {
        let tokens = ["<s>", "<pad>", "</s>", "<unk>", "\u{2581}a", "\u{2581}b", "\u{2581}"];
        let mut metadata = Metadata::new();
        metadata.set("tokenizer.ggml.model", "t5");
        metadata.set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens.into_iter().collect())));
        metadata.set("tokenizer.ggml.scores", vec![0.0_f32, 0.0, 0.0, 0.0, -1.0, -1.0, -2.0]);
        metadata.set("tokenizer.ggml.token_type", vec![3_i32, 3, 3, 2, 1, 1, 1]);
        metadata.set("tokenizer.ggml.add_space_prefix", true);
        metadata.set("tokenizer.ggml.add_bos_token", true);
        metadata.set("tokenizer.ggml.add_eos_token", true);
        for (role, id) in [("bos", 0_u32), ("eos", 2), ("seperator", 2), ("unknown", 3)] {
            metadata.set(format!("tokenizer.ggml.{role}_token_id"), id);
        }
        metadata
    }

    #[test]
    fn a_pair_is_joined_as_its_family_was_trained() {
        let mut bert = vocabulary("bert-bge");
        let pair = "[CLS] \u{2581}the [SEP] \u{2581}of [SEP]";
        assert_eq!(spelt(&reranker(&bert, None).unwrap(), "the", "of"), pair);
        // An additional EOS, which some files have, changes nothing; nor do texts that spell tokens.
        bert.set("tokenizer.ggml.eos_token_id", bert.u32("tokenizer.ggml.seperator_token_id").unwrap().unwrap());
        assert_eq!(spelt(&reranker(&bert, None).unwrap(), "the", "of"), pair);
        assert_eq!(spelt(&reranker(&bert, None).unwrap(), "", ""), "[CLS] [SEP] [SEP]");
        assert_eq!(spelt(&reranker(&bert, None).unwrap(), "[SEP]", "").matches("[SEP]").count(), 2);

        let mut xlm = xlm_roberta();
        let pair = "<s> \u{2581}a </s> </s> \u{2581}b </s>";
        assert_eq!(spelt(&reranker(&xlm, None).unwrap(), "a", "b"), pair);
        xlm.set("tokenizer.ggml.add_sep_token", false);
        assert_eq!(spelt(&reranker(&xlm, None).unwrap(), "a", "b"), "<s> \u{2581}a </s> \u{2581}b </s>");
    }

    #[test]
    fn a_template_is_filled_once_and_only_its_own_tokens_are_control_tokens() {
        let bert = vocabulary("bert-bge");
        let template = reranker(&bert, Some("[CLS]{query}[SEP]{document}[SEP]")).unwrap();
        assert_eq!(spelt(&template, "the", "of"), "[CLS] \u{2581}the [SEP] \u{2581}of [SEP]");
        let n_control = |text: &str| text.split(' ').filter(|token| ["[CLS]", "[SEP]"].contains(token)).count();
        for (query, document) in [("{document}", "[SEP]"), ("[SEP]", "{query}"), ("[S", "EP]"), ("", "")] {
            let text = spelt(&template, query, document);
            assert_eq!(n_control(&text), 3, "{text}");
        }
        // A control token of the template does not extend into a text.
        let cut = reranker(&bert, Some("{query}{document}SEP]")).unwrap();
        assert_eq!(n_control(&spelt(&cut, "of", "[")), 0);
        let before = reranker(&bert, Some("{query}[S{document}")).unwrap();
        assert_eq!(n_control(&spelt(&before, "of", "EP]")), 0);
    }

    #[test]
    fn invalid_templates_are_refused() {
        let bert = vocabulary("bert-bge");
        for template in ["", "{query}", "{document}", "{query} {doc}"] {
            let error = reranker(&bert, Some(template)).unwrap_err();
            assert!(error.to_string().contains("lacks {query} or {document}"), "{error}");
        }
        assert!(reranker(&bert, Some(&"{query}{document}".repeat(8))).is_ok());
        assert!(reranker(&bert, Some(&"{query}{document}".repeat(9))).is_err());
    }

    #[test]
    fn the_best_come_first() {
        assert_eq!(best_first(&[1.0, f32::NAN, 3.0, -2.0, 3.0]), [2, 4, 0, 3, 1]);
        assert!(best_first(&[]).is_empty());
    }
}
