//! Dense feed-forwards, `down(activation(gate(x)) * up(x))`.

use metal_attention_model::{Dense, DenseWeights};

use crate::forward::{MIN_PARALLEL_ELEMENTS, MicroBatchRun, ProductInput, add_bias, resize};
use crate::kernels::elementwise::Activate;
use crate::kernels::matmul::{MatmulOp, matmul};
use crate::layers::PreparedLinear;
use crate::shared::SharedMut;

impl MicroBatchRun<'_> {
    /// The hidden vectors of a dense feed-forward, `activation(gate(normed)) * up(normed)`, without a gate
    /// `activation(up(normed))`, to `gate_or_hidden`, `[n_tokens, n_ff]`. The caller multiplies them by `down`.
    pub(crate) fn dense(&mut self, w: &DenseWeights<PreparedLinear>) {
        let Dense { n_ff, gated: _, activation, fused: _ } = w.spec;
        // Without a gate projection the up projection is written to `gate_or_hidden`, and activated there.
        let first = w.gate.as_ref().unwrap_or(&w.up);
        let second = w.gate.as_ref().map(|_| &w.up);
        match second {
            Some(up) => self.observe(&[first, up], ProductInput::Normed),
            None => self.observe(&[first], ProductInput::Normed),
        }
        let s = &mut *self.scratch;
        let n_tokens = s.x.len() / self.spec.n_embd;
        resize(&mut s.gate_or_hidden, n_tokens * n_ff);
        let mut products =
            vec![MatmulOp { matrix: &first.weight, rows: 0..n_tokens, y: &mut s.gate_or_hidden, accumulate: false }];
        if let Some(up) = second {
            resize(&mut s.up, n_tokens * n_ff);
            products.push(MatmulOp { matrix: &up.weight, rows: 0..n_tokens, y: &mut s.up, accumulate: false });
        }
        matmul(self.pool, self.isa, &s.normed, &mut s.q8, &mut products);
        self.record_time("matmul_gate_up");
        let s = &mut *self.scratch;
        let isa = self.isa;
        let (gate, up) = (SharedMut::new(&mut s.gate_or_hidden), SharedMut::new(&mut s.up));
        self.pool.for_each_if(n_tokens * n_ff >= MIN_PARALLEL_ELEMENTS, n_tokens, &|t| {
            // SAFETY: each token owns its rows.
            let gate = unsafe { gate.slice(t * n_ff, n_ff) };
            add_bias(gate, first);
            let up = second.map(|linear| {
                // SAFETY: as above.
                let up = unsafe { up.slice(t * n_ff, n_ff) };
                add_bias(up, linear);
                &*up
            });
            isa.run(Activate { activation, gate, up });
        });
        self.record_time("ffn_activation");
    }
}
