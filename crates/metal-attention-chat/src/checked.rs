//! Rewrites a parsed template so that every operator is charged to the meter before it runs.
//!
//! minijinja evaluates operators itself and has no hook for them. So the syntax tree is rewritten before it is
//! compiled: operators that create or search values become calls of filters (`operators.rs`), whose names cannot be
//! written in a template. The meaning of the template does not change. The rewrite also enforces limits of nesting and
//! rejects constructs that minijinja does not handle safely.

use std::collections::BTreeSet;

use minijinja::Value;
use minijinja::machinery::Span;
use minijinja::machinery::ast::{
    AutoEscape, BinOp, BinOpKind, Block, Call, CallArg, CallBlock, CallType, Compare, CompareOp, Const, Do, EmitExpr,
    Expr, Extends, Filter, FilterBlock, ForLoop, FromImport, GetAttr, GetItem, IfCond, IfExpr, Import, Include, List,
    Macro, Map, Set, SetBlock, Spanned, Stmt, Template, Test, Tuple, UnaryOp, UnaryOpKind, Var, WithBlock,
};

use crate::TemplateLimit;
use crate::operators::{
    ADD, ATTRIBUTE, CHARGED, CONCAT, EQ, GE, GT, ITERATED, LE, LT, MAX_ATTRIBUTES, MEASURED, MUL, NE, REM, SLICE,
    SPREAD,
};
use crate::program::CompileError;
use crate::python_methods::is_name_of_method;

/// The maximum nesting of blocks and operators. Published templates have at most 19.
pub(crate) const MAX_NESTING: usize = 400;
/// The maximum length in bytes of a string constant that is not charged for.
const SMALL: usize = 64;

/// The rewriter of one template.
pub(crate) struct Checker<'s> {
    depth: usize,
    /// The greatest nesting depth so far.
    pub deepest: usize,
    /// The variables that the template reads.
    pub names: BTreeSet<&'s str>,
    /// The attributes that the template sets.
    pub attributes: BTreeSet<&'s str>,
    /// Whether a `break` here would leave only blocks that minijinja can leave. Inside some blocks (with, set, filter)
    /// it cannot.
    breaks: bool,
}

type Checked<T> = Result<T, CompileError>;

impl<'s> Checker<'s> {
    pub fn new() -> Self {
        Self { depth: 0, deepest: 0, names: BTreeSet::new(), attributes: BTreeSet::new(), breaks: true }
    }

    /// Rewrites a template.
    pub fn template(&mut self, template: &Stmt<'s>) -> Checked<Stmt<'s>> {
        self.stmt(template)
    }

    /// Runs `inner` one nesting level deeper; an error if that is too deep.
    fn deeper<T>(&mut self, span: Span, inner: impl FnOnce(&mut Self) -> Checked<T>) -> Checked<T> {
        self.depth += 1;
        self.deepest = self.deepest.max(self.depth);
        if self.depth > MAX_NESTING {
            return Err(TemplateLimit::Nesting { line: span.start_line.into(), limit: MAX_NESTING }.into());
        }
        let result = inner(self);
        self.depth -= 1;
        result
    }

    fn stmt(&mut self, stmt: &Stmt<'s>) -> Checked<Stmt<'s>> {
        let span = stmt_span(stmt);
        self.deeper(span, |this| this.stmt_here(stmt, span))
    }

    fn stmt_here(&mut self, stmt: &Stmt<'s>, span: Span) -> Checked<Stmt<'s>> {
        Ok(match stmt {
            Stmt::Template(t) => Stmt::Template(Spanned::new(Template { children: self.stmts(&t.children)? }, span)),
            Stmt::EmitExpr(e) => Stmt::EmitExpr(Spanned::new(EmitExpr { expr: self.expr(&e.expr)? }, span)),
            // An expression, so that text that is captured by a block is charged, too.
            Stmt::EmitRaw(raw) => Stmt::EmitExpr(Spanned::new(EmitExpr { expr: constant(raw.raw, span) }, span)),
            Stmt::ForLoop(l) => Stmt::ForLoop(Spanned::new(self.for_loop(l)?, span)),
            Stmt::IfCond(c) => {
                let expr = condition(self.expr(&c.expr)?);
                let (true_body, false_body) = (self.stmts(&c.true_body)?, self.stmts(&c.false_body)?);
                Stmt::IfCond(Spanned::new(IfCond { expr, true_body, false_body }, span))
            }
            Stmt::WithBlock(w) => {
                let pairs = w.assignments.iter();
                let assignments = pairs
                    .map(|(target, value)| Ok((self.target(target)?, self.expr(value)?)))
                    .collect::<Checked<_>>()?;
                Stmt::WithBlock(Spanned::new(WithBlock { assignments, body: self.inside(&w.body, false)? }, span))
            }
            Stmt::Set(s) if appended(&s.expr).is_some() => Stmt::Set(Spanned::new(self.append(&s.expr, span)?, span)),
            Stmt::Set(s) => {
                let (target, expr) = (self.target(&s.target)?, self.expr(&s.expr)?);
                // A namespace must not contain a lazy sequence or a namespace, which could contain itself.
                let expr = if sets_attribute(&target) { call(MEASURED, expr, [], span) } else { expr };
                Stmt::Set(Spanned::new(Set { target, expr }, span))
            }
            Stmt::SetBlock(s) => {
                let filter = s.filter.as_ref().map(|filter| self.expr(filter)).transpose()?;
                let target = self.target(&s.target)?;
                Stmt::SetBlock(Spanned::new(SetBlock { target, filter, body: self.inside(&s.body, false)? }, span))
            }
            Stmt::AutoEscape(a) => {
                let enabled = self.expr(&a.enabled)?;
                Stmt::AutoEscape(Spanned::new(AutoEscape { enabled, body: self.inside(&a.body, false)? }, span))
            }
            Stmt::FilterBlock(f) => {
                let filter = self.expr(&f.filter)?;
                Stmt::FilterBlock(Spanned::new(FilterBlock { filter, body: self.inside(&f.body, false)? }, span))
            }
            Stmt::Block(b) => {
                let body = self.inside(&b.body, true)?;
                Stmt::Block(Spanned::new(Block { name: b.name, required: b.required, body }, span))
            }
            Stmt::Import(i) => {
                Stmt::Import(Spanned::new(Import { expr: self.expr(&i.expr)?, name: self.target(&i.name)? }, span))
            }
            Stmt::FromImport(f) => {
                let names = f.names.iter().map(|(name, alias)| {
                    Ok((self.target(name)?, alias.as_ref().map(|alias| self.target(alias)).transpose()?))
                });
                let names = names.collect::<Checked<_>>()?;
                Stmt::FromImport(Spanned::new(FromImport { expr: self.expr(&f.expr)?, names }, span))
            }
            Stmt::Extends(e) => Stmt::Extends(Spanned::new(Extends { name: self.expr(&e.name)? }, span)),
            Stmt::Include(i) => {
                let name = self.expr(&i.name)?;
                Stmt::Include(Spanned::new(Include { name, ignore_missing: i.ignore_missing }, span))
            }
            Stmt::Macro(m) => Stmt::Macro(Spanned::new(self.macro_decl(m)?, span)),
            Stmt::CallBlock(c) => {
                let call = Spanned::new(self.call(&c.call)?, c.call.span());
                let macro_decl = Spanned::new(self.macro_decl(&c.macro_decl)?, c.macro_decl.span());
                Stmt::CallBlock(Spanned::new(CallBlock { call, macro_decl }, span))
            }
            Stmt::Continue(_) | Stmt::Break(_) if !self.breaks => {
                return Err(CompileError::new("a loop cannot be left from within a block that is not done", span));
            }
            Stmt::Continue(_) => Stmt::Continue(Spanned::new(minijinja::machinery::ast::Continue, span)),
            Stmt::Break(_) => Stmt::Break(Spanned::new(minijinja::machinery::ast::Break, span)),
            Stmt::Do(d) => Stmt::Do(Spanned::new(Do { call: Spanned::new(self.call(&d.call)?, d.call.span()) }, span)),
        })
    }

    /// Rewrites `namespace.list.append(item)` to `namespace.list = namespace.list + [item]`, because values are
    /// immutable here.
    fn append(&mut self, expr: &Expr<'s>, span: Span) -> Checked<Set<'s>> {
        let Some((list, item)) = appended(expr) else { return Err(CompileError::new("append() takes an item", span)) };
        let (target, old, item) = (self.target(list)?, self.expr(list)?, self.expr(item)?);
        let items = call(MEASURED, Expr::List(Spanned::new(List { items: vec![item] }, span)), [], span);
        Ok(Set { target, expr: call(MEASURED, call(ADD, old, [items], span), [], span) })
    }

    fn stmts(&mut self, stmts: &[Stmt<'s>]) -> Checked<Vec<Stmt<'s>>> {
        stmts.iter().map(|stmt| self.stmt(stmt)).collect()
    }

    /// Rewrites the statements of a block. `breaks`: whether loops may be left from within it.
    fn inside(&mut self, body: &[Stmt<'s>], breaks: bool) -> Checked<Vec<Stmt<'s>>> {
        let outside = std::mem::replace(&mut self.breaks, breaks);
        let body = self.stmts(body);
        self.breaks = outside;
        body
    }

    fn for_loop(&mut self, l: &ForLoop<'s>) -> Checked<ForLoop<'s>> {
        let iter = self.expr(&l.iter)?;
        Ok(ForLoop {
            target: self.target(&l.target)?,
            iter: call(ITERATED, iter, [], l.iter.span()),
            filter_expr: self.optional(l.filter_expr.as_ref())?.map(condition),
            recursive: l.recursive,
            body: self.inside(&l.body, true)?,
            else_body: self.stmts(&l.else_body)?,
        })
    }

    fn macro_decl(&mut self, m: &Macro<'s>) -> Checked<Macro<'s>> {
        Ok(Macro {
            name: m.name,
            args: m.args.iter().map(|arg| self.target(arg)).collect::<Checked<_>>()?,
            defaults: self.exprs(&m.defaults)?,
            body: self.inside(&m.body, true)?,
        })
    }

    /// Rewrites the target of an assignment, which may be a name, an attribute or a list of such.
    fn target(&mut self, target: &Expr<'s>) -> Checked<Expr<'s>> {
        let span = target.span();
        self.deeper(span, |this| match target {
            Expr::Var(var) => Ok(Expr::Var(Spanned::new(Var { id: var.id }, span))),
            Expr::GetAttr(attr) => {
                this.attributes.insert(attr.name);
                if this.attributes.len() > MAX_ATTRIBUTES {
                    return Err(TemplateLimit::Attributes { limit: MAX_ATTRIBUTES }.into());
                }
                let expr = this.expr(&attr.expr)?;
                Ok(Expr::GetAttr(Spanned::new(GetAttr { expr, name: attr.name }, span)))
            }
            Expr::List(list) => {
                let items = list.items.iter().map(|item| this.target(item)).collect::<Checked<_>>()?;
                Ok(Expr::List(Spanned::new(List { items }, span)))
            }
            Expr::Const(_)
            | Expr::Slice(_)
            | Expr::UnaryOp(_)
            | Expr::BinOp(_)
            | Expr::Compare(_)
            | Expr::IfExpr(_)
            | Expr::Filter(_)
            | Expr::Test(_)
            | Expr::GetItem(_)
            | Expr::Call(_)
            | Expr::Tuple(_)
            | Expr::Map(_) => Err(CompileError::new("only names and attributes can be assigned to", span)),
        })
    }

    fn exprs(&mut self, exprs: &[Expr<'s>]) -> Checked<Vec<Expr<'s>>> {
        exprs.iter().map(|expr| self.expr(expr)).collect()
    }

    fn optional(&mut self, expr: Option<&Expr<'s>>) -> Checked<Option<Expr<'s>>> {
        expr.map(|expr| self.expr(expr)).transpose()
    }

    fn expr(&mut self, expr: &Expr<'s>) -> Checked<Expr<'s>> {
        let span = expr.span();
        self.deeper(span, |this| this.expr_here(expr, span))
    }

    fn expr_here(&mut self, expr: &Expr<'s>, span: Span) -> Checked<Expr<'s>> {
        Ok(match expr {
            Expr::Var(var) => {
                self.names.insert(var.id);
                Expr::Var(Spanned::new(Var { id: var.id }, span))
            }
            Expr::Const(c) => Expr::Const(Spanned::new(Const { value: c.value.clone() }, span)),
            Expr::Slice(s) => {
                let value = self.expr(&s.expr)?;
                let mut bound = |bound: &Option<Expr<'s>>| match bound {
                    Some(bound) => self.expr(bound),
                    None => Ok(constant((), span)),
                };
                call(SLICE, value, [bound(&s.start)?, bound(&s.stop)?, bound(&s.step)?], span)
            }
            Expr::UnaryOp(u) => {
                // `UnaryOpKind` implements neither Copy nor Clone.
                #[allow(clippy::needless_match)]
                let op = match u.op {
                    UnaryOpKind::Not => UnaryOpKind::Not,
                    UnaryOpKind::Neg => UnaryOpKind::Neg,
                };
                Expr::UnaryOp(Spanned::new(UnaryOp { op, expr: condition(self.expr(&u.expr)?) }, span))
            }
            Expr::BinOp(op) => self.operator(op, span)?,
            Expr::Compare(c) => {
                let expr = charged(self.expr(&c.expr)?);
                let ops = c.ops.iter().map(|op| Ok(CompareOp { op: op.op, expr: charged(self.expr(&op.expr)?) }));
                let ops = ops.collect::<Checked<_>>()?;
                Expr::Compare(Spanned::new(Compare { expr, ops }, span))
            }
            Expr::IfExpr(i) => {
                let (test_expr, true_expr) = (condition(self.expr(&i.test_expr)?), self.expr(&i.true_expr)?);
                let false_expr = self.optional(i.false_expr.as_ref())?;
                Expr::IfExpr(Spanned::new(IfExpr { test_expr, true_expr, false_expr }, span))
            }
            Expr::Filter(f) => {
                let (expr, args) = (self.optional(f.expr.as_ref())?, self.args(&f.args)?);
                Expr::Filter(Spanned::new(Filter { name: f.name, expr, args }, span))
            }
            Expr::Test(t) => {
                let (expr, args) = (self.expr(&t.expr)?, self.args(&t.args)?);
                Expr::Test(Spanned::new(Test { name: t.name, expr, args }, span))
            }
            Expr::GetAttr(a) if is_name_of_method(a.name) => {
                call(ATTRIBUTE, self.expr(&a.expr)?, [constant(a.name, span)], span)
            }
            Expr::GetAttr(a) => Expr::GetAttr(Spanned::new(GetAttr { expr: self.expr(&a.expr)?, name: a.name }, span)),
            Expr::GetItem(i) => {
                let (expr, subscript_expr) = (self.expr(&i.expr)?, charged(self.expr(&i.subscript_expr)?));
                // Indexing a string takes time linear in its length. Looking up a constant key does not apply to
                // strings.
                let is_name = matches!(&subscript_expr, Expr::Const(c) if c.value.as_str().is_some());
                let expr = if is_name { expr } else { call(ITERATED, expr, [], span) };
                Expr::GetItem(Spanned::new(GetItem { expr, subscript_expr }, span))
            }
            Expr::Call(c) => Expr::Call(Spanned::new(self.call(c)?, span)),
            Expr::List(l) => {
                let items = self.exprs(&l.items)?;
                call(MEASURED, Expr::List(Spanned::new(List { items }, span)), [], span)
            }
            Expr::Tuple(t) => {
                let items = self.exprs(&t.items)?;
                call(MEASURED, Expr::Tuple(Spanned::new(Tuple { items }, span)), [], span)
            }
            Expr::Map(m) => {
                let keys = m.keys.iter().map(|key| Ok(charged(self.expr(key)?))).collect::<Checked<_>>()?;
                let values = self.exprs(&m.values)?;
                call(MEASURED, Expr::Map(Spanned::new(Map { keys, values }, span)), [], span)
            }
        })
    }

    fn operator(&mut self, op: &Spanned<BinOp<'s>>, span: Span) -> Checked<Expr<'s>> {
        let (left, right) = (self.expr(&op.left)?, self.expr(&op.right)?);
        // Comparison with a small constant stops at the constant's length, so it is not charged. The constant is not a
        // tuple, so minijinja's own operator is correct.
        let small = is_small(&left) || is_small(&right);
        let priced = |expr| if small { expr } else { charged(expr) };
        let (left, right) = match op.op {
            BinOpKind::Add => return Ok(call(ADD, left, [right], span)),
            BinOpKind::Mul => return Ok(call(MUL, left, [right], span)),
            BinOpKind::Rem => return Ok(call(REM, left, [right], span)),
            BinOpKind::Concat => return Ok(call(CONCAT, left, [right], span)),
            BinOpKind::In => (charged(left), charged(right)),
            BinOpKind::Eq | BinOpKind::Ne if small => (left, right),
            BinOpKind::Eq => return Ok(call(EQ, priced(left), [priced(right)], span)),
            BinOpKind::Ne => return Ok(call(NE, priced(left), [priced(right)], span)),
            BinOpKind::Lt => return Ok(call(LT, priced(left), [priced(right)], span)),
            BinOpKind::Lte => return Ok(call(LE, priced(left), [priced(right)], span)),
            BinOpKind::Gt => return Ok(call(GT, priced(left), [priced(right)], span)),
            BinOpKind::Gte => return Ok(call(GE, priced(left), [priced(right)], span)),
            BinOpKind::ScAnd | BinOpKind::ScOr => (condition(left), condition(right)),
            // Operators on numbers take constant time.
            BinOpKind::Sub | BinOpKind::Div | BinOpKind::FloorDiv | BinOpKind::Pow => (left, right),
        };
        Ok(Expr::BinOp(Spanned::new(BinOp { op: op.op, left, right }, span)))
    }

    fn call(&mut self, c: &Spanned<Call<'s>>) -> Checked<Call<'s>> {
        // The method is looked up by the call.
        let expr = match &c.expr {
            Expr::GetAttr(a) => {
                let span = a.span();
                let expr = self.deeper(span, |this| this.expr(&a.expr))?;
                Expr::GetAttr(Spanned::new(GetAttr { expr, name: a.name }, span))
            }
            callee => self.expr(callee)?,
        };
        let mut args = self.args(&c.args)?;
        match c.identify_call() {
            // `loop.changed` stores its arguments. They are measured, so that the loop cannot store itself.
            CallType::Method(_, "changed") => {
                args = args
                    .into_iter()
                    .map(|arg| match arg {
                        CallArg::Pos(value) => Ok(CallArg::Pos(call(MEASURED, value, [], c.span()))),
                        CallArg::Kwarg(..) | CallArg::PosSplat(_) | CallArg::KwargSplat(_) => {
                            Err(CompileError::new("changed() takes plain values", c.span()))
                        }
                    })
                    .collect::<Checked<_>>()?;
            }
            CallType::Method(_, "cycle") if !args.iter().any(|arg| matches!(arg, CallArg::Pos(_))) => {
                return Err(CompileError::new("cycle() takes values", c.span()));
            }
            // The function could be a recursive `loop(...)`, which iterates over its argument.
            CallType::Function(_) if args.len() == 1 => {
                args = args
                    .into_iter()
                    .map(|arg| match arg {
                        CallArg::Pos(value) if !is_small(&value) => CallArg::Pos(call(ITERATED, value, [], c.span())),
                        CallArg::Pos(_) | CallArg::Kwarg(..) | CallArg::PosSplat(_) | CallArg::KwargSplat(_) => arg,
                    })
                    .collect();
            }
            CallType::Method(..) | CallType::Function(_) | CallType::Block(_) | CallType::Object(_) => {}
        }
        Ok(Call { expr, args })
    }

    fn args(&mut self, args: &[CallArg<'s>]) -> Checked<Vec<CallArg<'s>>> {
        let arg = |arg: &CallArg<'s>| {
            Ok(match arg {
                CallArg::Pos(expr) => CallArg::Pos(self.expr(expr)?),
                CallArg::Kwarg(name, expr) => CallArg::Kwarg(name, self.expr(expr)?),
                CallArg::PosSplat(expr) => CallArg::PosSplat(call(SPREAD, self.expr(expr)?, [], expr.span())),
                CallArg::KwargSplat(expr) => CallArg::KwargSplat(call(SPREAD, self.expr(expr)?, [], expr.span())),
            })
        };
        args.iter().map(arg).collect()
    }
}

/// The list and the item of an expression `namespace.list.append(item)`; `None` for other expressions.
fn appended<'e, 's>(expr: &'e Expr<'s>) -> Option<(&'e Expr<'s>, &'e Expr<'s>)> {
    let Expr::Call(call) = expr else { return None };
    let (Expr::GetAttr(method), [CallArg::Pos(item)]) = (&call.expr, &call.args[..]) else { return None };
    let is_attribute = matches!(method.expr, Expr::GetAttr(_));
    (method.name == "append" && is_attribute).then_some((&method.expr, item))
}

/// A call of the filter `name`.
fn call<'s, const N: usize>(name: &'static str, value: Expr<'s>, args: [Expr<'s>; N], span: Span) -> Expr<'s> {
    let args = args.into_iter().map(CallArg::Pos).collect();
    Expr::Filter(Spanned::new(Filter { name, expr: Some(value), args }, span))
}

fn constant<'s>(value: impl Into<Value>, span: Span) -> Expr<'s> {
    Expr::Const(Spanned::new(Const { value: value.into() }, span))
}

/// `expr`, charged for its size before it is searched or compared.
fn charged(expr: Expr<'_>) -> Expr<'_> {
    let span = expr.span();
    if is_small(&expr) { expr } else { call(CHARGED, expr, [], span) }
}

/// `expr` as a condition. The truth value of a namespace is found by iterating over its attributes, so it is charged.
/// Only variables can be namespaces.
fn condition(expr: Expr<'_>) -> Expr<'_> {
    let span = expr.span();
    if matches!(expr, Expr::Var(_) | Expr::IfExpr(_)) { call(ITERATED, expr, [], span) } else { expr }
}

fn is_small(expr: &Expr<'_>) -> bool {
    matches!(expr, Expr::Const(c) if c.value.as_str().is_none_or(|text| text.len() <= SMALL))
}

fn sets_attribute(target: &Expr<'_>) -> bool {
    match target {
        Expr::GetAttr(_) => true,
        Expr::List(list) => list.items.iter().any(sets_attribute),
        // `target` allows only names here.
        _ => false,
    }
}

fn stmt_span(stmt: &Stmt<'_>) -> Span {
    match stmt {
        Stmt::Template(s) => s.span(),
        Stmt::EmitExpr(s) => s.span(),
        Stmt::EmitRaw(s) => s.span(),
        Stmt::ForLoop(s) => s.span(),
        Stmt::IfCond(s) => s.span(),
        Stmt::WithBlock(s) => s.span(),
        Stmt::Set(s) => s.span(),
        Stmt::SetBlock(s) => s.span(),
        Stmt::AutoEscape(s) => s.span(),
        Stmt::FilterBlock(s) => s.span(),
        Stmt::Block(s) => s.span(),
        Stmt::Import(s) => s.span(),
        Stmt::FromImport(s) => s.span(),
        Stmt::Extends(s) => s.span(),
        Stmt::Include(s) => s.span(),
        Stmt::Macro(s) => s.span(),
        Stmt::CallBlock(s) => s.span(),
        Stmt::Continue(s) => s.span(),
        Stmt::Break(s) => s.span(),
        Stmt::Do(s) => s.span(),
    }
}
