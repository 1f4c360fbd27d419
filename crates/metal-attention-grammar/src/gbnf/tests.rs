//! Tests of GBNF grammars: texts that each grammar must accept and texts that it must refuse.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metal_attention::tokenizer::Tokenizer;

use super::syntax::{Expr, GbnfRule};
use crate::test_vocabulary::{accepts, vocabulary};
use crate::{GrammarCompiler, ResponseFormat};

/// A vocabulary of the 256 bytes and two control tokens.
fn bytes() -> Arc<Tokenizer> {
    vocabulary(&["<think>", "</think>"])
}

/// Checks that `grammar` accepts the texts of `good` and refuses those of `bad`.
#[track_caller]
fn describes(grammar: &str, good: &[&str], bad: &[&str]) {
    let tokenizer = bytes();
    let made = GrammarCompiler::new(&tokenizer).raw(&ResponseFormat::Gbnf(grammar.into()), &mut Vec::new());
    let made = made.unwrap_or_else(|error| {
        panic!("{error}\n{grammar}\n{}", super::to_lark(grammar, &tokenizer, 20_000).unwrap_or_default())
    });
    let lark = || super::to_lark(grammar, &tokenizer, 20_000).unwrap();
    for text in good {
        assert!(accepts(made.clone(), &tokenizer, text), "{text:?} is refused by\n{grammar}\n{}", lark());
    }
    for text in bad {
        assert!(!accepts(made.clone(), &tokenizer, text), "{text:?} is accepted by\n{grammar}\n{}", lark());
    }
}

const JSON: &str = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied after literal chars
ws ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn json() {
    describes(
        JSON,
        &[
            "{}",
            r#"{"a": 1, "b": [true, null, -2.5e+3, "x\n\u00e9 é"], "c": {"d": {}}}"#,
            "{\n  \"a\": [\n    1,\n    2\n  ]\n}\n",
        ],
        &["", "[]", r#"{"a": 01}"#, r#"{"a": 1,}"#, r#"{"a" 1}"#, r#"{"a": "x}"#, r#"{"a": tru}"#, "{}}", "{  }"],
    );
}

/// The JSON grammar from before repetitions had bounds: the rule for white space is recursive.
#[test]
fn json_with_recursive_space() {
    describes(
        r#"root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\] |
    "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F]) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]*)) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= ([ \t\n] ws)?"#,
        &["{}", "{ \n\t\"a\" : [ 1 , 2 ] \n}  ", r#"{"a":"\/"}"#],
        &["{", r#"{"a":}"#, r#"{"a":"\x"}"#],
    );
}

#[test]
fn arithmetic() {
    describes(
        "root  ::= (expr \"=\" ws term \"\\n\")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | \"(\" ws expr \")\" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \\t\\n]*
",
        &["1+2=3\n", "(x_1 *(y -20)) /4 = z\n1=1\n", "a\n= b\n\n", "a=b\nc=d\n"],
        &["1+=3\n", "1+2=3", "(1=1\n", "1=1=1\n", "X=1\n", "\n"],
    );
}

#[test]
fn lists() {
    describes(
        "root ::= item+\n\n# Excludes various line break characters\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ \"\\n\"\n",
        &["- a\n", "- one\n- zwei ß – 二\n"],
        &["a\n", "- \n", "- a", "- a\u{2028}b\n", "- a\n\n"],
    );
}

#[test]
fn chess() {
    describes(
        r#"# Specifies chess moves as a list in algebraic notation, using PGN conventions
root    ::= (
    # it must start with the characters "1. "
    "1. " move " " move "\n"
    ([1-9] [0-9]? ". " move " " move "\n")+
)
move    ::= (pawn | nonpawn | castle) [+#]?
# piece type, optional file/rank, optional capture, dest file & rank
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"#,
        &["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 e5\n2. Qxf7+ O-O-O#\n12. exd8=Q Rae1\n"],
        &["1. e4 e5\n", "1. e9 e5\n2. a1 a1\n", "2. e4 e5\n", "1. e4 e5\n2. O-O-O-O a1\n"],
    );
}

#[test]
fn c_programs() {
    describes(
        r#"root ::= (declaration)*
declaration ::= dataType identifier "(" parameter? ")" "{" statement* "}"
dataType  ::= "int" ws | "float" ws | "char" ws
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
parameter ::= dataType identifier
statement ::=
    ( dataType identifier ws "=" ws expression ";" ) |
    ( identifier ws "=" ws expression ";" ) |
    ( identifier ws "(" argList? ")" ";" ) |
    ( "return" ws expression ";" ) |
    ( "while" "(" condition ")" "{" statement* "}" ) |
    ( "for" "(" forInit ";" ws condition ";" ws forUpdate ")" "{" statement* "}" ) |
    ( "if" "(" condition ")" "{" statement* "}" ("else" "{" statement* "}")? ) |
    ( singleLineComment ) |
    ( multiLineComment )
forInit ::= dataType identifier ws "=" ws expression | identifier ws "=" ws expression
forUpdate ::= identifier ws "=" ws expression
condition ::= expression relationOperator expression
relationOperator ::= ("<=" | "<" | "==" | "!=" | ">=" | ">")
expression ::= term (("+" | "-") term)*
term ::= factor(("*" | "/") factor)*
factor ::= identifier | number | unaryTerm | funcCall | parenExpression
unaryTerm ::= "-" factor
funcCall ::= identifier "(" argList? ")"
parenExpression ::= "(" ws expression ws ")"
argList ::= expression ("," ws expression)*
number ::= [0-9]+
singleLineComment ::= "//" [^\n]* "\n"
multiLineComment ::= "/*" ( [^*] | ("*" [^/]) )* "*/"
ws ::= ([ \t\n]+)
"#,
        &[
            "int main(){return 0;}",
            "int f(float x){int y = x*-(\n g(1, 2) );y = y/2;if(y<=1){h ();}else{}while(a!=b){whiles = 1;}}char g(){}",
            "int f(){for(int i = 0; i<9; i = i+1){x = 1;}//yes */ int\n/* it ** is // so */return x;}",
        ],
        &[
            "int main(){return0;}",
            "intmain(){}",
            "int main(){return 0}",
            "int f(){if(a){}}",
            "int 1f(){}",
            "int f(){/* open }",
        ],
    );
}

#[test]
fn scripts_of_other_languages() {
    describes(
        r"# A probably incorrect grammar for Japanese
root        ::= jp-char+ ([ \t\n] jp-char+)*
jp-char     ::= hiragana | katakana | punctuation | cjk
hiragana    ::= [ぁ-ゟ]
katakana    ::= [ァ-ヿ]
punctuation ::= [、-〾]
cjk         ::= [一-鿿]
",
        &["こんにちは", "東京 タワー、\nです。"],
        &["", "hello", "こ ", "こ  こ", "é"],
    );
    describes(
        "# a basic English grammar\nroot ::= en-char+ ([ \\t\\n] en-char+)*\nen-char ::= letter | digit | punctuation\n\
         letter ::= [a-zA-Z]\ndigit ::= [0-9]\npunctuation ::= [!\"#$%&'()*+,-./:;<=>?@[\\\\\\]^_`{|}~]\n",
        &["Hello, world!", "a\tb [1] \\ {x}"],
        &["", " a", "é", "a  b"],
    );
}

/// llguidance's lexer is greedy; these grammars would be matched wrongly if that made a difference.
#[test]
fn greedy_terminals_do_not_conflict() {
    // Recursion prevents the whole grammar from becoming one terminal.
    let nested = |inner: &str| format!("root ::= \"<\" root \">\" | text\n{inner}");
    describes(&nested("text ::= [a-z]+ \"x\""), &["ax", "<abxx>", "<<xxx>>"], &["x", "<ab>", "ax>"]);
    describes(
        &nested("text ::= (a | b) \"bc\"\na ::= \"a\"\nb ::= \"ab\""),
        &["abc", "<abbc>"],
        &["ab", "bc", "abbbc"],
    );
    describes(&nested("text ::= [a-z]* \">\" [a-z]*"), &["a>b", ">", "<>>", "<a>b>"], &["a", "<ab>", ">>"]);
    describes(&nested("text ::= \"if\" | [a-z]+ [0-9]"), &["if", "iff1", "<if>", "if1"], &["iff", "<1>"]);
    describes(
        &nested("text ::= (\"a\"? \"b\"?){3} \"ab\""),
        &["ab", "abab", "<bbbab>", "abababab"],
        &["a", "ba", "<bbbbab>"],
    );
    describes(
        "root ::= s\ns ::= \"a\" s \"a\" | \"b\"? \n",
        &["", "b", "aa", "aba", "aaaa", "aabaa"],
        &["a", "ab", "aab", "abb"],
    );
}

#[test]
fn repetitions() {
    let nested = |inner: &str| format!("root ::= \"(\" root \")\" | text\n{inner}");
    for wrap in [|inner: &str| inner.replace("text", "root"), nested] {
        describes(
            &wrap("text ::= \"a\"{2,3} [b]{2} (\"c\" \"d\"){1,}"),
            &["aabbcd", "aaabbcdcd"],
            &["abbcd", "aaaabbcd", "aabbc"],
        );
        describes(
            &wrap("text ::= ([0-9]{1,3} \",\"){0,2} \"x\"?"),
            &["", "1,", "12,345,x"],
            &["1,2,3,", "1234,", "xx"],
        );
        describes(&wrap("text ::= \"a\"{0} \"b\"{ 1 , 2 }"), &["b", "bb"], &["ab", "bbb", ""]);
        describes(&wrap("text ::= ((\"a\"+)+)? \"b\"**"), &["", "aaa", "abb"], &["ba"]);
    }
}

#[test]
fn layouts() {
    // In XGrammar's EBNF a rule may continue on the next line.
    describes(
        "\n   root ::= a\n      | b   # two\n\n   a ::= \"a\"\n     \"c\"\n   b ::= \"b\" |\n\n \"d\"",
        &["ac", "b", "d"],
        &["a"],
    );
    describes("root::=\"a\"\r\n#c\r\n b ::= \"b\"\r\n", &["a"], &["b"]);
    describes(
        "root ::= \"\\x41\\u00e9\\U0001F600\\\"\\]\\-\\t\" [\\]a\\-c-]",
        &["Aé😀\"]-\t]", "Aé😀\"]-\t-"],
        &["Aé😀\"]-\tb"],
    );
    describes("root ::= .{2} | [^a]", &["é\n", "b"], &["a", "abc"]);
    describes("root ::= \"\"", &[""], &["a"]);
    describes("root ::= [+] | \"/\" \"\n\" | \"//\"", &["+", "/\n", "//"], &["/"]);
}

#[test]
fn tokens() {
    let thinking = "root ::= <think> thinking </think> answer\nthinking ::= !</think>*\nanswer ::= [a-z]+";
    describes(
        thinking,
        &["<think>So (1)</think>abc", "<think></think>a"],
        &["<think>a", "abc", "<think>a</think>", "<think>a</think>B"],
    );
    describes("root ::= <[256]> [a-z]* <[257]>", &["<think>ab</think>"], &["<think>AB</think>", "ab"]);
}

#[test]
fn mistakes_are_named() {
    let grammars = GrammarCompiler::new(&bytes());
    for (grammar, said) in [
        ("", "it has no rule \"root\", which describes the whole text"),
        ("start ::= \"a\"", "it has no rule \"root\", which describes the whole text"),
        ("root ::= a\na ::= b", "line 2: the rule \"b\" is not defined"),
        ("root ::= a\na ::= b \"x\"\nb ::= \"y\"? a", "line 2: the rule \"a\" begins with itself (left recursion)"),
        ("root ::= root | \"a\"", "line 1: the rule \"root\" begins with itself (left recursion)"),
        ("root ::= \"a\" root", "line 1: no text ends by the rule \"root\": what it describes always goes on"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule \"root\" is defined on line 1 already"),
        ("root = \"a\"", "line 1: ::= after the name \"root\" is expected where \"= \\\"a\\\"\" comes"),
        ("root ::= \"a", "line 1: a text in quotes does not end"),
        ("root ::=\n\n [a-", "line 3: a class of characters, [...], does not end"),
        ("root ::= [z-a]", "line 1: the range from 'z' to 'a' runs backwards"),
        ("root ::= []", "line 1: a class of characters has none"),
        ("root ::= (\"a\"\n\"b\"", "line 2: a ) for the ( of line 1 is expected where the grammar ends"),
        ("root ::= \"a\")", "line 1: a ) has no ("),
        ("root ::= * \"a\"", "line 1: * has nothing before it that it could repeat"),
        ("root ::= \"a\"{3,2}", "line 1: a repetition of 3 to 2 times is none"),
        ("root ::= \"a\"{99999999999}", "line 1: 99999999999 repetitions are too many; at most 10000 are allowed"),
        ("root ::= \"a\"{x}", "line 1: a number of repetitions is expected where \"x}\" comes"),
        ("root ::= \"\\q\"", "line 1: \\q stands for no character"),
        ("root ::= \"\\uD800\"", "line 1: D800 is the number of no character"),
        ("root ::= \"\\x4\"", "line 1: an escape has fewer than 2 hexadecimal digits"),
        ("root ::= <[9999]>", "line 1: <[9999]> is no token of the vocabulary, which has 259"),
        ("root ::= <no-token>", "line 1: <no-token> is no token of the vocabulary, which has 259"),
        ("root ::= !\"a\"", "line 1: a token, as in <[1000]> or <think>, is expected where \"\\\"a\\\"\" comes"),
        ("root ::= \"a\" (=\"b\")", "line 1: look-aheads, (=...), cannot be followed"),
        ("root ::= \"a\" ;", "line 1: a part of a rule, or the end of the line, is expected where \";\" comes"),
    ] {
        let error =
            grammars.raw(&ResponseFormat::Gbnf(grammar.into()), &mut Vec::new()).err().map(|error| error.to_string());
        assert_eq!(error, Some(format!("the grammar: {said}")), "{grammar}");
    }
}

#[test]
fn hostile_grammars_are_refused_in_time() {
    let chain = |n: usize| {
        let rules =
            (0..n).map(|i| format!("a{i} ::= \"x\" a{} a{} | \"y\"\n", i + 1, i + 1)).collect::<Vec<_>>().concat();
        format!("root ::= a0\n{rules}a{n} ::= \"z\"\n")
    };
    let mutual = (0..300)
        .map(|i| format!("a{i} ::= [a-z]+ a{} [0-9a-z]* a{} | \"y\"\n", (i + 1) % 300, (i * 7) % 300))
        .collect::<Vec<_>>()
        .concat();
    let many = (0..3000).map(|i| format!(" | \"k{i}\" root \"{i}\"")).collect::<Vec<_>>().concat();
    let grammars = GrammarCompiler::new(&bytes());
    for (grammar, is_made) in [
        ("root ::= ".to_owned() + &"(".repeat(100_000), false),
        ("root ::= ".to_owned() + &"(".repeat(5000) + "\"a\"" + &")*".repeat(5000), false),
        ("root ::= \"a\"".to_owned() + &"*".repeat(5000), false),
        ("root ::= ((((\"a\"{10000}){10000}){10000}){10000}){10000}".into(), true),
        ("root ::= (([a-z]{0,100} [0-9]){0,100} \"x\"){0,100}".into(), true),
        ("root ::= ([ab]* \"a\" [ab]{40})* \"c\"".into(), true),
        ("root ::= \"(\" root \")\" | ([ab]* \"a\" [ab]{30})* \"c\"".into(), true),
        (chain(40), true),
        (chain(4000), false),
        (format!("root ::= a0\n{mutual}"), true),
        (format!("root ::= \"x\"{many}"), false),
        ("root ::= \"".to_owned() + &"a".repeat(1 << 20) + "\"", false),
        ("root ::= [".to_owned() + &"ac".repeat(60_000) + "]", true),
        ("root ::= \"a\" | ".to_owned() + &"[^b]{0,50} | ".repeat(5000) + "\"c\"", false),
        ("a ::= b\n".repeat(1 << 14), false),
    ] {
        let start = Instant::now();
        let made = grammars.raw(&ResponseFormat::Gbnf(grammar.clone()), &mut Vec::new());
        let took = start.elapsed();
        let said = made.as_ref().err().map_or_else(String::new, ToString::to_string);
        let shown: String = grammar.chars().take(60).collect();
        assert!(took < Duration::from_secs(10), "{shown:?} took {took:?}");
        assert_eq!(made.is_ok(), is_made, "{shown:?}: {said}");
    }
}

/// The ends of the texts from `at` on that `expr` matches.
fn ends(expr: &Expr, rules: &[GbnfRule], text: &[char], at: usize) -> BTreeSet<usize> {
    match expr {
        Expr::Chars(class) => {
            let has = |c: &&char| class.ranges().iter().any(|range| (range.start()..=range.end()).contains(*c));
            text.get(at).filter(has).map(|_| at + 1).into_iter().collect()
        }
        Expr::Text(expected) => {
            let expected: Vec<char> = expected.chars().collect();
            text[at..].starts_with(&expected).then_some(at + expected.len()).into_iter().collect()
        }
        Expr::Rule(number) => ends(&rules[*number].body, rules, text, at),
        Expr::Token { .. } => BTreeSet::new(),
        Expr::Sequence(parts) => parts.iter().fold(BTreeSet::from([at]), |from, part| {
            from.into_iter().flat_map(|at| ends(part, rules, text, at)).collect()
        }),
        Expr::Choice(parts) => parts.iter().flat_map(|part| ends(part, rules, text, at)).collect(),
        Expr::Repeat { item, min, max } => {
            let (mut all, mut from) = (BTreeSet::new(), BTreeSet::from([at]));
            // A non-empty item occurs at most as often as there are characters.
            for times in 0..=max.map_or(*min as usize + text.len(), |max| max as usize) {
                if times >= *min as usize {
                    all.extend(&from);
                }
                from = from.into_iter().flat_map(|at| ends(item, rules, text, at)).collect();
            }
            all
        }
    }
}

/// Random grammars over two letters are compared with a direct evaluation of their rules, for all short texts.
#[test]
fn random_grammars_describe_what_their_rules_say() {
    fn expr(random: &mut Lcg, depth: usize) -> String {
        let inner = |random: &mut Lcg| expr(random, depth + 1);
        match random.below(if depth > 3 { 4 } else { 10 }) {
            0 => "\"a\"".into(),
            1 => "\"ab\"".into(),
            2 => "[ab]".into(),
            3 => ["root", "x", "y"][random.below(3)].into(),
            4 | 5 => format!("{} {}", inner(random), inner(random)),
            6 | 7 => format!("({} | {})", inner(random), inner(random)),
            8 => format!("({})?", inner(random)),
            _ => format!("({}){}", inner(random), ["*", "+", "{2}", "{1,2}"][random.below(4)]),
        }
    }
    let tokenizer = bytes();
    let grammars = GrammarCompiler::new(&tokenizer);
    let texts: Vec<String> = (0..=5)
        .flat_map(|n| (0..1 << n).map(move |bits| (0..n).map(|i| if bits >> i & 1 == 0 { 'a' } else { 'b' }).collect()))
        .collect();
    let mut random = Lcg(1);
    let mut n_made = 0;
    while n_made < 60 {
        let [root, x, y] = [(); 3].map(|()| expr(&mut random, 0));
        let grammar = format!("root ::= {root}\nx ::= {x} | \"b\"\ny ::= {y}");
        let Ok((number, rules)) = super::syntax::read(&grammar, &tokenizer) else { continue };
        if super::rules::check(number, &rules).is_err() {
            continue;
        }
        n_made += 1;
        let made = grammars.raw(&ResponseFormat::Gbnf(grammar.clone()), &mut Vec::new()).unwrap();
        for text in &texts {
            let chars: Vec<char> = text.chars().collect();
            let described = ends(&rules[number].body, &rules, &chars, 0).contains(&chars.len());
            let lark = || super::to_lark(&grammar, &tokenizer, 200_000).unwrap();
            assert_eq!(accepts(made.clone(), &tokenizer, text), described, "{text:?} by\n{grammar}\n{}", lark());
        }
    }
}

/// A pseudo-random number generator: an LCG with the multiplier of MMIX.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % bound
    }
}
