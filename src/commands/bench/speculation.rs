//! `bench --spec`: measures what a drafter gains over decode steps of one token each, on the text of a file.
//!
//! The text decides which drafts hold, so that acceptance is that of real text whatever the model would write. The model
//! evaluates its own choices and the drafts: steps without drafts run ahead as they do elsewhere, and a step with drafts costs
//! what it costs. Rounds with and without drafts take turns.

use std::io::Write;
use std::time::Instant;

use metal_attention::speculation::{Draft, DraftDepth, DraftRequest, SpeculativePass, Speculator, max_drafts_of_step};
use metal_attention::{
    Batch, BatchToken, EngineOptions, Error, ForwardError, ForwardPass, HiddenRequest, HiddenRows, Model, OutputKind,
    Outputs, TracedTokens,
};
use serde::Serialize;

use crate::cli_error::CliError;
use crate::progress::ProgressLine;

/// What is measured.
pub struct SpeculationBench<'a> {
    /// Sets up the model and its drafter.
    pub open: &'a dyn Fn(&EngineOptions) -> Result<SpeculativePass, Error>,
    /// How many drafts a step may have.
    pub depth: DraftDepth,
    /// The text's name in the report.
    pub text: &'a str,
    /// The tokens that are in the context before the timed part.
    pub prompt: &'a [u32],
    /// The tokens that are generated.
    pub generated: &'a [u32],
    /// Sequences that are decoded together, each with the text.
    pub batch: usize,
    /// Rounds before the timed ones, and timed rounds.
    pub n_rounds: [usize; 2],
}

/// The report of one model on one device with one drafter: an object of `--json`. Rates are tokens a second of all sequences.
#[derive(Debug, Serialize)]
pub struct SpeculationReport {
    /// The model's name.
    pub model: String,
    /// `cpu`, `cuda` or `gpu`, and its name.
    pub device: String,
    pub device_name: String,
    /// CPU threads; 1 for a GPU.
    pub threads: usize,
    /// The drafter.
    pub drafter: &'static str,
    /// The file with the text.
    pub text: String,
    /// Sequences that are decoded together.
    pub batch: usize,
    /// Tokens before the timed part, and tokens of each sequence in it.
    pub n_prompt: usize,
    pub n_gen: usize,
    /// Steps of a round with drafts, drafts evaluated in them, and those that held; in the last round.
    pub n_steps: usize,
    pub n_drafted: usize,
    pub n_accepted: usize,
    /// Medians of the rounds without and with drafts.
    pub plain_tokens_per_second: f64,
    pub drafted_tokens_per_second: f64,
    /// The median of the ratios of paired rounds.
    pub ratio: f64,
    /// Tokens a second of each pair of rounds, without and with drafts.
    pub samples: Vec<[f64; 2]>,
}

/// The counts of a round with drafts.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    steps: usize,
    drafted: usize,
    accepted: usize,
}

impl SpeculationBench<'_> {
    /// Measures a model. `None` after Ctrl-C.
    pub fn measure(
        &self,
        model: &Model,
        name: &str,
        options: &EngineOptions,
    ) -> Result<Option<SpeculationReport>, CliError> {
        let n_ctx = self.prompt.len() + self.generated.len() + 1;
        let loading = ProgressLine::spinner("loading the model");
        loading.weigh(model.gguf().tensor_bytes());
        let options = EngineOptions { n_ctx: Some(n_ctx), n_seq: self.batch, ..options.clone() };
        let SpeculativePass { mut pass, drafter } = (self.open)(&options)?;
        drop(loading);
        let Some(drafter) = drafter else {
            return Err(CliError::Usage("--spec off has nothing to measure".into()));
        };
        let drafter_name = drafter.name();
        let mut speculator = Speculator::new(drafter, self.depth);
        speculator.time_plain_steps(&mut *pass, self.batch);
        let [n_warmup, n_timed] = self.n_rounds;
        let progress = ProgressLine::steps("measuring", (n_warmup + n_timed) as u64);
        progress.describe(format!("{name}, {drafter_name}, {} sequences", self.batch));
        let (mut samples, mut counts) = (Vec::new(), Counts::default());
        for round in 0..n_warmup + n_timed {
            let mut rates = [0.0; 2];
            for (rate, with_drafts) in rates.iter_mut().zip([false, true]) {
                let outcome = self.round(&mut *pass, with_drafts.then_some(&mut speculator));
                let (seconds, of_round) = match outcome {
                    Err(ForwardError::Cancelled) => return Ok(None),
                    outcome => outcome.map_err(Error::from)?,
                };
                *rate = (self.batch * self.generated.len()) as f64 / seconds;
                counts = of_round;
            }
            if round >= n_warmup {
                samples.push(rates);
            }
            progress.set(round as u64 + 1);
        }
        let device = pass.device();
        Ok(Some(SpeculationReport {
            model: name.to_owned(),
            device: device.kind.to_owned(),
            device_name: device.name,
            threads: device.n_threads,
            drafter: drafter_name,
            text: self.text.to_owned(),
            batch: self.batch,
            n_prompt: self.prompt.len(),
            n_gen: self.generated.len(),
            n_steps: counts.steps,
            n_drafted: counts.drafted,
            n_accepted: counts.accepted,
            plain_tokens_per_second: median(samples.iter().map(|rates| rates[0])),
            drafted_tokens_per_second: median(samples.iter().map(|rates| rates[1])),
            ratio: median(samples.iter().map(|rates| rates[1] / rates[0])),
            samples,
        }))
    }

    /// Generates the text in all sequences, with drafts if there is a speculator. Returns the seconds without the prefill.
    fn round(
        &self,
        pass: &mut dyn ForwardPass,
        mut speculator: Option<&mut Speculator>,
    ) -> Result<(f64, Counts), ForwardError> {
        pass.reset();
        let text = [self.prompt, self.generated].concat();
        // The choices of the model after each sequence.
        let mut own = Vec::new();
        for seq in 0..self.batch {
            own.push(self.prefill(pass, &mut speculator, seq)?);
        }
        let start = Instant::now();
        let mut counts = Counts::default();
        // The tokens of each sequence that are known. The last of them is not evaluated.
        let mut known = vec![self.prompt.len() + 1; self.batch];
        loop {
            let running: Vec<usize> = (0..self.batch).filter(|&seq| known[seq] < text.len()).collect();
            if running.is_empty() {
                return Ok((start.elapsed().as_secs_f64(), counts));
            }
            let drafts = match &mut speculator {
                None => vec![Draft::default(); running.len()],
                Some(speculator) => {
                    let request = |&seq: &usize| DraftRequest {
                        seq,
                        ids: &text[..known[seq]],
                        prediction: &[],
                        n: speculator.max_depth().min(text.len() - known[seq] - 1),
                    };
                    let requests: Vec<_> = running.iter().map(request).collect();
                    let max_rows = max_drafts_of_step(pass, running.len());
                    speculator.propose(pass, running.len(), max_rows, &requests, &[])
                }
            };
            let n_drafts: usize = drafts.iter().map(|draft| draft.ids.len()).sum();
            let mut tokens = Vec::new();
            let mut drafted = Vec::new();
            for (&seq, draft) in running.iter().zip(&drafts) {
                let ids = [own[seq]].into_iter().chain(draft.ids.iter().copied());
                tokens.extend(ids.zip(known[seq] - 1..).map(|(id, pos)| BatchToken { id, seq, pos, output: true }));
                drafted.extend((!draft.ids.is_empty()).then_some(seq));
            }
            let before = speculator.as_ref().map_or(Vec::new(), |speculator| speculator.reads_hidden(false).to_vec());
            let step = Instant::now();
            let (ids, hidden) = evaluate(pass, &tokens, &drafted, &before)?;
            let time = step.elapsed();
            let mut row = 0;
            for (&seq, draft) in running.iter().zip(&drafts) {
                let held = draft.ids.iter().zip(&text[known[seq]..]).take_while(|(id, want)| id == want).count();
                own[seq] = ids[row + held];
                if let Some(speculator) = &mut speculator {
                    let first = known[seq] - 1;
                    if !draft.ids.is_empty() {
                        speculator.record_verified(seq, draft.ids.len(), held);
                    }
                    speculator.observe(&hidden, row, seq, first, &text[first..=first + held]);
                }
                row += 1 + draft.ids.len();
                known[seq] += 1 + held;
                if !draft.ids.is_empty() {
                    pass.rewind(seq, known[seq] - 1);
                }
                counts.accepted += held;
            }
            counts.steps += 1;
            counts.drafted += n_drafts;
            if let Some(speculator) = &mut speculator {
                speculator.record_step(running.len(), n_drafts, !before.is_empty(), time);
            }
        }
    }

    /// Evaluates the prompt in sequence `seq`. Returns the model's choice after it.
    fn prefill(
        &self,
        pass: &mut dyn ForwardPass,
        speculator: &mut Option<&mut Speculator>,
        seq: usize,
    ) -> Result<u32, ForwardError> {
        let mut chosen = 0;
        for (i, ids) in self.prompt.chunks(pass.n_ubatch()).enumerate() {
            let first = i * pass.n_ubatch();
            let token = |(i, &id): (usize, &u32)| BatchToken {
                id,
                seq,
                pos: first + i,
                output: first + i + 1 == self.prompt.len(),
            };
            let chunk: Vec<_> = ids.iter().enumerate().map(token).collect();
            let before = speculator.as_ref().map_or(Vec::new(), |speculator| speculator.reads_hidden(true).to_vec());
            let (ids, hidden) = evaluate(pass, &chunk, &[], &before)?;
            chosen = ids.first().copied().unwrap_or(chosen);
            if let Some(speculator) = speculator {
                speculator.observe(&hidden, 0, seq, first, &self.prompt[first..first + chunk.len()]);
            }
        }
        Ok(chosen)
    }
}

/// Evaluates a batch. Returns the model's choice after each output token, and the hidden rows of all tokens before the layers
/// `before`.
fn evaluate(
    pass: &mut dyn ForwardPass,
    tokens: &[BatchToken],
    drafted: &[usize],
    before: &[usize],
) -> Result<(Vec<u32>, HiddenRows), ForwardError> {
    if drafted.is_empty() && before.is_empty() {
        return Ok((pass.forward_greedy(tokens)?, HiddenRows::default()));
    }
    let batch = Batch { drafted, ..Batch::from(tokens) };
    let request = HiddenRequest { before, tokens: TracedTokens::All };
    match pass.forward_with_hidden(batch, OutputKind::Ids, request)? {
        (Outputs::Ids(ids), hidden) => Ok((ids, hidden)),
        (Outputs::Logits(_) | Outputs::Hidden(_) | Outputs::TopK(_), _) => {
            Err(ForwardError::Device { why: "it returned no ids".into() })
        }
    }
}

/// `n` tokens that a model writes greedily after a prompt of `n_prompt` tokens with consecutive ids, with that prompt.
pub fn own_text(model: &Model, options: &EngineOptions, n_prompt: usize, n: usize) -> Result<Vec<u32>, CliError> {
    let mut pass = model.forward_pass(&EngineOptions { n_ctx: Some(n_prompt + n + 1), ..options.clone() })?;
    let n_vocab = model.spec().n_vocab as u32;
    let mut ids: Vec<u32> = (0..n_prompt as u32).map(|i| (n_vocab / 4 + i) % n_vocab).collect();
    if n_prompt > 0 && n > 0 {
        ids.push(pass.forward_prompt(&ids).map_err(Error::from)?);
        while ids.len() < n_prompt + n {
            ids.push(pass.forward_token_greedy(ids[ids.len() - 1]).map_err(Error::from)?);
        }
    }
    Ok(ids)
}

/// The median; 0 without values.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n => f64::midpoint(values[(n - 1) / 2], values[n / 2]),
    }
}

/// Writes the reports to stdout: as JSON, or as a table.
pub fn print(reports: &[SpeculationReport], json: bool) -> Result<(), CliError> {
    let text = if json {
        let text = serde_json::to_string_pretty(reports);
        text.map_err(|e| CliError::General(format!("cannot write JSON: {e}")))? + "\n"
    } else {
        reports.iter().map(line).collect()
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(CliError::stdout)
}

/// The lines of a report.
fn line(report: &SpeculationReport) -> String {
    let SpeculationReport { model, device, device_name, drafter, text, batch, n_prompt, n_gen, .. } = report;
    let SpeculationReport { n_steps, n_drafted, n_accepted, plain_tokens_per_second: plain, .. } = report;
    let (drafted, ratio) = (report.drafted_tokens_per_second, report.ratio);
    format!(
        "{model}, {device} ({device_name}), {drafter}, {text}: {n_gen} tokens after {n_prompt}, {batch} sequence(s)\n  \
         without drafts {plain:.1} tokens/s, with drafts {drafted:.1} tokens/s, ratio {ratio:.2}\n  \
         {n_steps} steps, {n_accepted} of {n_drafted} drafts held\n"
    )
}

#[cfg(test)]
mod tests {
    use metal_attention::speculation::{DrafterKind, Speculation};
    use metal_attention::{Device, Model};

    use super::*;

    #[test]
    fn a_text_that_repeats_itself_takes_fewer_steps() {
        let model = Model::built_in().unwrap();
        let options = EngineOptions { device: Device::Cpu, ..Default::default() };
        let page: Vec<u32> = (10..60).collect();
        let bench = |generated: &[u32], batch| {
            let bench = SpeculationBench {
                open: &|options| {
                    let ngram = Speculation { drafter: DrafterKind::Ngram, ..Default::default() };
                    SpeculativePass::new(&model, options, ngram)
                },
                depth: DraftDepth::default(),
                text: "page.txt",
                prompt: &page,
                generated,
                batch,
                n_rounds: [1, 2],
            };
            bench.measure(&model, "stories", &options).unwrap().unwrap()
        };
        let report = bench(&page.repeat(2), 2);
        assert_eq!((report.samples.len(), report.n_prompt, report.n_gen, report.batch), (2, 50, 100, 2));
        assert!(report.n_accepted > 0 && report.n_accepted <= report.n_drafted, "{report:?}");
        assert!(report.n_steps < 99 && report.n_steps * 2 + report.n_accepted >= 198, "{report:?}");
        // A text without repetitions has no drafts.
        let report = bench(&(100..200).collect::<Vec<_>>(), 1);
        assert_eq!((report.n_steps, report.n_drafted), (99, 0));
    }
}
