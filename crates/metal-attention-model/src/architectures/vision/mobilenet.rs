//! MobileNet V5, the encoder of Gemma 3n: convolutions in four stages, each of which halves the grid, with attention in the last two.

use metal_attention_pictures::{Filter, Layout};

use crate::vision::{
    EncoderActivation, EncoderNorm, EncoderReader, FileWeights, PatchOrder, PatchSpec, QueryAttention, Stage,
    VisionModel,
};
use crate::{ModelError, NormKind};

/// Epsilon of all norms.
const EPS: f32 = 1e-6;
/// Rows and columns of the result.
const RESULT: usize = 16;
/// Pixels of a side that become one patch before the result is pooled.
const REDUCTION: usize = 16;
/// Most blocks of a stage.
const MAX_BLOCKS: usize = 256;

/// Stages under construction, of rows of `width` elements.
struct Builder<'a> {
    r: &'a EncoderReader<'a>,
    stages: Vec<Stage<FileWeights>>,
    width: usize,
}

impl Builder<'_> {
    /// A norm over the columns.
    fn norm(&mut self, name: &str) -> Result<(), ModelError> {
        if let Some(norm) = self.r.opt_norm(name, self.width, NormKind::Rms, EPS)? {
            self.stages.push(Stage::Norm(norm));
        }
        Ok(())
    }

    /// A convolution.
    fn convolution(&mut self, name: &str, stride: usize) -> Result<(), ModelError> {
        let (side, linear) = self.r.convolution(name, self.width)?;
        if side > 1 || stride > 1 {
            self.stages.push(Stage::Unfold { side, stride, centred: false });
        }
        self.width = linear.n_out;
        self.stages.push(Stage::Linear(linear));
        Ok(())
    }

    /// A convolution of each column by itself, with its norm, if it is there.
    fn depthwise(&mut self, name: &str, norm: &str, stride: usize) -> Result<bool, ModelError> {
        if !self.r.has(&format!("{name}.weight")) {
            return Ok(false);
        }
        let (side, kernel) = self.r.depthwise(name, self.width)?;
        self.stages.push(Stage::Depthwise { side, stride, kernel });
        self.norm(norm)?;
        Ok(true)
    }

    fn gelu(&mut self) {
        self.stages.push(Stage::Activation(EncoderActivation::Gelu));
    }

    /// Another builder for rows of this width.
    fn branch(&self) -> Self {
        Self { r: self.r, stages: Vec::new(), width: self.width }
    }

    /// Factors on the columns, if there are any.
    fn layer_scale(&mut self, prefix: &str) -> Result<(), ModelError> {
        let factors = self.r.opt_vector(&format!("{prefix}layer_scale.gamma"), self.width)?;
        self.stages.extend(factors.map(Stage::ScaleColumns));
        Ok(())
    }

    /// A block, which halves the grid with a `stride` of 2. Whether there is one.
    fn block(&mut self, prefix: &str, stride: usize) -> Result<bool, ModelError> {
        let name = |part: &str| format!("{prefix}{part}");
        let has = |part: &str| self.r.has(&format!("{prefix}{part}.weight"));
        let mut of = self.branch();
        if has("conv_exp") {
            of.convolution(&name("conv_exp"), stride)?;
            of.norm(&name("bn1"))?;
            of.gelu();
            of.convolution(&name("conv_pwl"), 1)?;
            of.norm(&name("bn2"))?;
        } else if has("attn.query.proj") {
            of.norm(&name("norm"))?;
            of.attention(&name("attn."))?;
            of.layer_scale(prefix)?;
        } else if has("pw_exp.conv") {
            of.depthwise(&name("dw_start.conv"), &name("dw_start.bn"), 1)?;
            of.convolution(&name("pw_exp.conv"), 1)?;
            of.norm(&name("pw_exp.bn"))?;
            of.gelu();
            if of.depthwise(&name("dw_mid.conv"), &name("dw_mid.bn"), stride)? {
                of.gelu();
            }
            of.convolution(&name("pw_proj.conv"), 1)?;
            of.norm(&name("pw_proj.bn"))?;
            of.layer_scale(prefix)?;
        } else {
            return Ok(false);
        }
        let is_residual = stride == 1 && of.width == self.width;
        self.width = of.width;
        if is_residual {
            self.stages.push(Stage::Sum([Vec::new(), of.stages]));
        } else {
            self.stages.extend(of.stages);
        }
        Ok(true)
    }

    /// Attention to keys and values of one head on half the grid.
    fn attention(&mut self, prefix: &str) -> Result<(), ModelError> {
        let name = |part: &str| format!("{prefix}{part}");
        let (_, q) = self.r.convolution(&name("query.proj"), self.width)?;
        let reduced = |part: &str| {
            let mut of = self.branch();
            of.depthwise(&name(&format!("{part}.down_conv")), &name(&format!("{part}.norm")), 2)?;
            of.convolution(&name(&format!("{part}.proj")), 1)?;
            Ok::<_, ModelError>((of.stages, of.width))
        };
        let ((k, head_dim), (v, width)) = (reduced("key")?, reduced("value")?);
        let fits = head_dim > 0 && width == head_dim && q.n_out.is_multiple_of(head_dim);
        self.r.keys.check("vision.embedding_length", head_dim, fits, "heads of attention must have one width")?;
        let (_, out) = self.r.convolution(&name("output.proj"), q.n_out)?;
        self.width = out.n_out;
        self.stages.push(Stage::QueryAttention(Box::new(QueryAttention { q, k, v, head_dim, out })));
        Ok(())
    }
}

pub(super) fn gemma3nv(r: &EncoderReader<'_>) -> Result<VisionModel, ModelError> {
    let mut b = Builder { r, stages: Vec::new(), width: 3 };
    b.convolution("v.conv_stem.conv", 2)?;
    b.norm("v.conv_stem.bn")?;
    b.gelu();
    let mut last_width = 0;
    for stage in 0..4 {
        for i in 0..MAX_BLOCKS {
            if !b.block(&format!("v.blk.{stage}.{i}."), if i == 0 { 2 } else { 1 })? {
                break;
            }
        }
        // The features of the last two stages are joined, on the grid of the first of them.
        if stage == 3 {
            b.stages.push(Stage::Enlarge { factor: 2 });
        }
        if stage >= 2 {
            b.stages.push(Stage::Feature(Vec::new()));
            last_width += b.width;
        }
    }
    b.stages.push(Stage::JoinFeatures { with_rows: false });
    b.width = last_width;
    b.convolution("v.msfa.ffn.pw_exp.conv", 1)?;
    b.norm("v.msfa.ffn.pw_exp.bn")?;
    b.gelu();
    b.convolution("v.msfa.ffn.pw_proj.conv", 1)?;
    b.norm("v.msfa.ffn.pw_proj.bn")?;
    let side = r.image / REDUCTION / RESULT;
    if side > 1 {
        b.stages.push(Stage::Pool { side });
    }
    b.norm("v.msfa.norm")?;
    let width = b.width;
    b.stages.push(Stage::Scale((width as f32).sqrt()));
    let plain = |width| EncoderNorm { kind: NormKind::Rms, eps: EPS, width, weight: vec![1.0; width], bias: None };
    let norm = r.opt_norm("mm.soft_emb_norm", width, NormKind::Rms, EPS)?.unwrap_or_else(|| plain(width));
    let projection = r.linear("mm.input_projection", width, Some(r.n_embd))?;
    b.stages.extend([Stage::Norm(norm), Stage::Linear(projection), Stage::Norm(plain(r.n_embd))]);
    let patch = PatchSpec { side: 1, order: PatchOrder::PixelFirst };
    let model = VisionModel::new(r.encoder(patch, b.stages), Layout::Square { side: r.image });
    Ok(model.with_filter(Filter::Bilinear).with_markers(&[["<start_of_image>", "<end_of_image>"]]))
}
