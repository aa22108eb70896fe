// SPDX-License-Identifier: Apache-2.0

#include "formats/deepspeed/name_pattern.h"

#include <cctype>

#include "core/base/strings.h"

namespace ckptfs::deepspeed {
namespace {

using Set = std::bitset<256>;
using Instruction = NamePattern::Instruction;
using Kind = Instruction::Kind;

constexpr size_t kMaxText = 4096;
constexpr int kMaxDepth = 64;
constexpr size_t kMaxProgram = 20000;
constexpr uint32_t kUnbounded = UINT32_MAX;

// A pattern as a tree; a repetition prints its child several times.
struct Node {
  enum class Type { kEmpty, kSet, kBegin, kEnd, kSequence, kChoice, kRepeat } type = Type::kEmpty;
  Set set;
  std::vector<Node> children;
  uint32_t least = 0;
  uint32_t most = 0;
};

Set Range(unsigned char from, unsigned char to) {
  Set out;
  for (unsigned c = from; c <= to; ++c) out.set(c);
  return out;
}

Set Single(char letter) {
  Set out;
  out.set(static_cast<unsigned char>(letter));
  return out;
}

// \d, \w, \s and their complements; nothing for another letter.
bool ClassOf(char letter, Set& out) {
  switch (letter) {
    case 'd': case 'D': out = Range('0', '9'); break;
    case 'w': case 'W':
      out = Range('0', '9') | Range('a', 'z') | Range('A', 'Z') | Single('_');
      break;
    case 's': case 'S': out = Range('\t', '\r') | Single(' '); break;
    default: return false;
  }
  if (letter < 'a') out.flip();
  return true;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<Node> Parse() {
    CKPT_ASSIGN_OR_RETURN(Node node, Choice(0));
    if (at_ < text_.size()) return Fail(ErrorCode::kInvalid, "a ')' without its '('");
    return node;
  }

 private:
  bool More() const { return at_ < text_.size(); }
  bool Eat(char letter) {
    if (!More() || text_[at_] != letter) return false;
    ++at_;
    return true;
  }

  Result<Node> Choice(int depth) {
    if (depth > kMaxDepth) return Fail(ErrorCode::kInvalid, "nested deeper than 64");
    Node out;
    out.type = Node::Type::kChoice;
    do {
      CKPT_ASSIGN_OR_RETURN(Node branch, Sequence(depth));
      out.children.push_back(std::move(branch));
    } while (Eat('|'));
    return out.children.size() == 1 ? std::move(out.children[0]) : out;
  }

  Result<Node> Sequence(int depth) {
    Node out;
    out.type = Node::Type::kSequence;
    while (More() && text_[at_] != '|' && text_[at_] != ')') {
      CKPT_ASSIGN_OR_RETURN(Node atom, Atom(depth));
      CKPT_ASSIGN_OR_RETURN(atom, Repeated(std::move(atom)));
      out.children.push_back(std::move(atom));
    }
    return out;
  }

  Result<Node> Atom(int depth) {
    const char letter = text_[at_++];
    Node out;
    out.type = Node::Type::kSet;
    switch (letter) {
      case '^': out.type = Node::Type::kBegin; return out;
      case '$': out.type = Node::Type::kEnd; return out;
      case '.': out.set = ~Single('\n'); return out;
      case '[': return Class();
      case '(': return Group(depth);
      case '\\': return Escape();
      case '*': case '+': case '?':
        return Fail(ErrorCode::kInvalid, "a repetition of nothing");
      default: out.set = Single(letter); return out;
    }
  }

  Result<Node> Group(int depth) {
    if (Eat('?') && !Eat(':')) {
      return Fail(ErrorCode::kUnsupported, "a group (?...) other than (?:...)");
    }
    CKPT_ASSIGN_OR_RETURN(Node out, Choice(depth + 1));
    if (!Eat(')')) return Fail(ErrorCode::kInvalid, "a '(' without its ')'");
    return out;
  }

  Result<Node> Escape() {
    if (!More()) return Fail(ErrorCode::kInvalid, "ends in a backslash");
    const char letter = text_[at_++];
    Node out;
    out.type = Node::Type::kSet;
    if (ClassOf(letter, out.set)) return out;
    if (letter == 'Z') {
      out.type = Node::Type::kEnd;
    } else if (letter == 'A') {
      out.type = Node::Type::kBegin;
    } else if (std::isalnum(static_cast<unsigned char>(letter)) != 0) {
      return Fail(ErrorCode::kUnsupported, StrCat("the escape \\", letter));
    } else {
      out.set = Single(letter);
    }
    return out;
  }

  Result<Node> Class() {
    Node out;
    out.type = Node::Type::kSet;
    const bool complement = Eat('^');
    for (bool first = true; first || (More() && text_[at_] != ']'); first = false) {
      if (!More()) return Fail(ErrorCode::kInvalid, "a '[' without its ']'");
      char from = text_[at_++];
      if (from == '\\') {
        if (!More()) return Fail(ErrorCode::kInvalid, "ends in a backslash");
        from = text_[at_++];
        Set known;
        if (ClassOf(from, known)) {
          out.set |= known;
          continue;
        }
      }
      char to = from;
      if (at_ + 1 < text_.size() && text_[at_] == '-' && text_[at_ + 1] != ']') {
        to = text_[at_ + 1];
        at_ += 2;
      }
      if (static_cast<unsigned char>(to) < static_cast<unsigned char>(from)) {
        return Fail(ErrorCode::kInvalid, "a class whose range runs backwards");
      }
      out.set |= Range(static_cast<unsigned char>(from), static_cast<unsigned char>(to));
    }
    if (!Eat(']')) return Fail(ErrorCode::kInvalid, "a '[' without its ']'");
    if (complement) out.set.flip();
    return out;
  }

  bool Number(uint32_t& out) {
    const size_t begin = at_;
    uint64_t value = 0;
    while (More() && text_[at_] >= '0' && text_[at_] <= '9' && value < 10000) {
      value = value * 10 + static_cast<uint64_t>(text_[at_++] - '0');
    }
    out = static_cast<uint32_t>(value);
    return at_ > begin;
  }

  Result<Node> Repeated(Node atom) {
    uint32_t least = 1;
    uint32_t most = 1;
    const size_t before = at_;
    if (Eat('*')) {
      least = 0;
      most = kUnbounded;
    } else if (Eat('+')) {
      most = kUnbounded;
    } else if (Eat('?')) {
      least = 0;
    } else if (Eat('{')) {
      const bool number = Number(least);
      most = least;
      if (number && Eat(',') && !Number(most)) most = kUnbounded;
      if (!number || !Eat('}')) {  // Python takes it literally then
        at_ = before;
        return atom;
      }
    } else {
      return atom;
    }
    (void)Eat('?');  // lazy: the same names match
    if (most < least) return Fail(ErrorCode::kInvalid, "a repetition {m,n} with n < m");
    Node out;
    out.type = Node::Type::kRepeat;
    out.least = least;
    out.most = most;
    out.children.push_back(std::move(atom));
    return out;
  }

  std::string_view text_;
  size_t at_ = 0;
};

class Printer {
 public:
  Printer(std::vector<Instruction>& program, std::vector<Set>& sets)
      : program_(program), sets_(sets) {}

  Status Print(const Node& node) {
    if (program_.size() > kMaxProgram || ++visits_ > 8 * kMaxProgram) return Fail(ErrorCode::kInvalid, "repetitions too large");
    switch (node.type) {
      case Node::Type::kEmpty: break;
      case Node::Type::kSet:
        sets_.push_back(node.set);
        Add(Kind::kSet, static_cast<uint32_t>(sets_.size() - 1));
        break;
      case Node::Type::kBegin: Add(Kind::kBegin); break;
      case Node::Type::kEnd: Add(Kind::kEnd); break;
      case Node::Type::kSequence:
        for (const Node& child : node.children) CKPT_RETURN_IF_ERROR(Print(child));
        break;
      case Node::Type::kChoice: return PrintChoice(node);
      case Node::Type::kRepeat: return PrintRepeat(node);
    }
    return {};
  }

 private:
  uint32_t Here() const { return static_cast<uint32_t>(program_.size()); }
  uint32_t Add(Kind kind, uint32_t a = 0, uint32_t b = 0) {
    program_.push_back(Instruction{kind, a, b});
    return Here() - 1;
  }

  Status PrintChoice(const Node& node) {
    std::vector<uint32_t> jumps;
    for (size_t i = 0; i + 1 < node.children.size(); ++i) {
      const uint32_t split = Add(Kind::kSplit, Here() + 1);
      CKPT_RETURN_IF_ERROR(Print(node.children[i]));
      jumps.push_back(Add(Kind::kJump));
      program_[split].b = Here();
    }
    CKPT_RETURN_IF_ERROR(Print(node.children.back()));
    for (uint32_t jump : jumps) program_[jump].a = Here();
    return {};
  }

  Status PrintRepeat(const Node& node) {
    const Node& child = node.children[0];
    for (uint32_t i = 0; i < node.least; ++i) CKPT_RETURN_IF_ERROR(Print(child));
    if (node.most == kUnbounded) {
      const uint32_t split = Add(Kind::kSplit, Here() + 1);
      CKPT_RETURN_IF_ERROR(Print(child));
      Add(Kind::kJump, split);
      program_[split].b = Here();
      return {};
    }
    std::vector<uint32_t> splits;
    for (uint32_t i = node.least; i < node.most; ++i) {
      splits.push_back(Add(Kind::kSplit, Here() + 1));
      CKPT_RETURN_IF_ERROR(Print(child));
    }
    for (uint32_t split : splits) program_[split].b = Here();
    return {};
  }

  std::vector<Instruction>& program_;
  std::vector<Set>& sets_;
  size_t visits_ = 0;  // empty groups print nothing, so they are counted too
};

}  // namespace

Result<NamePattern> NamePattern::Parse(std::string_view text) {
  NamePattern out;
  out.text_ = text;
  const auto compile = [&]() -> Status {
    if (text.size() > kMaxText) return Fail(ErrorCode::kInvalid, "longer than 4096 characters");
    CKPT_ASSIGN_OR_RETURN(const Node tree, Parser(text).Parse());
    CKPT_RETURN_IF_ERROR(Printer(out.program_, out.sets_).Print(tree));
    out.program_.push_back(Instruction{Kind::kMatch});
    return {};
  };
  if (Status compiled = compile(); !compiled) {
    return Fail(std::move(compiled).error().WithContext(
        StrCat("pattern '", text.substr(0, 200), "'")));
  }
  return out;
}

// Adds the instructions that `at` leads to without reading a byte; `seen`
// holds the position (plus one) at which each was added last.
void NamePattern::Follow(uint32_t at, size_t position, size_t length,
                         std::vector<uint32_t>& threads, std::vector<size_t>& seen) const {
  std::vector<uint32_t> open{at};
  while (!open.empty()) {
    const uint32_t next = open.back();
    open.pop_back();
    if (seen[next] == position + 1) continue;
    seen[next] = position + 1;
    const Instruction& instruction = program_[next];
    switch (instruction.kind) {
      case Kind::kJump: open.push_back(instruction.a); break;
      case Kind::kSplit:
        open.push_back(instruction.b);
        open.push_back(instruction.a);
        break;
      case Kind::kBegin:
        if (position == 0) open.push_back(next + 1);
        break;
      case Kind::kEnd:
        if (position == length) open.push_back(next + 1);
        break;
      case Kind::kSet: case Kind::kMatch: threads.push_back(next); break;
    }
  }
}

bool NamePattern::Run(std::string_view name, bool whole) const {
  std::vector<uint32_t> threads;
  std::vector<uint32_t> next;
  std::vector<size_t> seen(program_.size(), 0);
  Follow(0, 0, name.size(), threads, seen);
  for (size_t position = 0;; ++position) {
    next.clear();
    for (const uint32_t thread : threads) {
      const Instruction& instruction = program_[thread];
      if (instruction.kind == Kind::kMatch) {
        if (!whole || position == name.size()) return true;
        continue;
      }
      if (position < name.size() &&
          sets_[instruction.a].test(static_cast<unsigned char>(name[position]))) {
        Follow(thread + 1, position + 1, name.size(), next, seen);
      }
    }
    if (position >= name.size() || next.empty()) return false;
    threads.swap(next);
  }
}

}  // namespace ckptfs::deepspeed
