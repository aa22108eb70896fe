// SPDX-License-Identifier: Apache-2.0

#include "core/manifest/old_facts.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/strings.h"
#include "core/manifest/manifest_check.h"

namespace ckptfs {
namespace {

// A text, a whole number, a truth, a list (or a tuple), a dict, or the name of a class.
struct Value {
  enum class Kind : uint8_t { kText, kNumber, kTruth, kList, kDict, kClass } kind = Kind::kText;
  std::string text = {};
  int64_t number = 0;
  std::vector<Value> items = {};  // of a dict: key, value, key, value ...
  int depth = 0;

  const Value* Find(std::string_view key) const {
    for (size_t i = 0; kind == Kind::kDict && i + 1 < items.size(); i += 2) {
      if (items[i].kind == Kind::kText && items[i].text == key) return &items[i + 1];
    }
    return nullptr;
  }
  bool IsText() const { return kind == Kind::kText; }
  bool IsList() const { return kind == Kind::kList; }
  bool IsDict() const { return kind == Kind::kDict; }
  bool IsNumber(int64_t limit) const {
    return kind == Kind::kNumber && number >= 0 && number <= limit;
  }
};

constexpr int64_t kAnyNumber = INT64_MAX;
constexpr int kDeepest = 8;
constexpr size_t kMostMarks = 16;

// Reads what PrintPickle printed of such values, opcode by opcode; nothing else.
class PlainPickle {
 public:
  explicit PlainPickle(std::string_view bytes) : bytes_(bytes) {}

  std::optional<Value> Read() && {
    while (good_ && !bytes_.empty()) {
      const char op = bytes_.front();
      bytes_.remove_prefix(1);
      if (op == '.') {
        if (stack_.size() != 1 || !bytes_.empty()) return std::nullopt;
        return std::move(stack_.front());
      }
      Run(op);
    }
    return std::nullopt;
  }

 private:
  using Kind = Value::Kind;

  void Run(char op) {
    switch (op) {
      case '\x80': good_ = Number(1) == 2; return;
      case '}': return Push({.kind = Kind::kDict});
      case ']':
      case ')': return Push({.kind = Kind::kList});
      case '(':
        marks_.push_back(stack_.size());
        good_ = marks_.size() <= kMostMarks;
        return;
      case 'u':
      case 'e': return Append(op == 'u' ? Kind::kDict : Kind::kList);
      case 't': return Tuple(stack_.size() - PopMark());
      case '\x85': return Tuple(1);
      case '\x86': return Tuple(2);
      case '\x87': return Tuple(3);
      case 'X': return Push({.text = std::string(Take(Number(4)))});
      case 'K': return Push({.kind = Kind::kNumber, .number = static_cast<int64_t>(Number(1))});
      case 'M': return Push({.kind = Kind::kNumber, .number = static_cast<int64_t>(Number(2))});
      case 'J': return Push({.kind = Kind::kNumber, .number = static_cast<int32_t>(Number(4))});
      case '\x8a': return Long(Number(1));
      case '\x88':
      case '\x89': return Push({.kind = Kind::kTruth, .number = op == '\x88'});
      case 'c': return Class();
      case 'R': return Call();
      case 'q':
      case 'r': return Remember(Number(op == 'q' ? 1 : 4));
      case 'h':
      case 'j': return Recall(Number(op == 'h' ? 1 : 4));
      default: good_ = false;
    }
  }

  std::string_view Take(uint64_t size) {
    good_ = good_ && size <= bytes_.size();
    const std::string_view taken = bytes_.substr(0, good_ ? size : 0);
    bytes_.remove_prefix(taken.size());
    return taken;
  }
  uint64_t Number(size_t width) {
    uint64_t value = 0;
    const std::string_view bytes = Take(width);
    std::memcpy(&value, bytes.data(), bytes.size());
    return value;
  }
  void Long(uint64_t width) {
    const std::string_view bytes = Take(width);
    good_ = good_ && width <= 8;
    if (!good_) return;
    int64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? -1 : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    Push({.kind = Kind::kNumber, .number = value});
  }
  void Push(Value value) {
    good_ = good_ && value.depth <= kDeepest;
    if (good_) stack_.push_back(std::move(value));
  }
  size_t PopMark() {
    good_ = good_ && !marks_.empty();
    if (!good_) return stack_.size();
    const size_t mark = marks_.back();
    marks_.pop_back();
    good_ = mark <= stack_.size();
    return good_ ? mark : stack_.size();
  }
  // Moves the stack's last values into another.
  void MoveInto(Value& into, size_t count) {
    for (size_t i = stack_.size() - count; i < stack_.size(); ++i) {
      into.depth = std::max(into.depth, stack_[i].depth + 1);
      into.items.push_back(std::move(stack_[i]));
    }
    stack_.resize(stack_.size() - count);
  }
  void Append(Kind kind) {
    const size_t mark = PopMark();
    good_ = good_ && mark > 0 && stack_[mark - 1].kind == kind &&
            (kind != Kind::kDict || (stack_.size() - mark) % 2 == 0);
    if (!good_) return;
    Value into = std::move(stack_[mark - 1]);
    MoveInto(into, stack_.size() - mark);
    stack_.pop_back();
    Push(std::move(into));
  }
  void Tuple(size_t count) {
    good_ = good_ && count <= stack_.size();
    if (!good_) return;
    Value tuple{.kind = Kind::kList};
    MoveInto(tuple, count);
    Push(std::move(tuple));
  }
  void Class() {
    const size_t end = bytes_.find('\n', bytes_.find('\n') + 1);
    good_ = end != std::string_view::npos && bytes_.find('\n') != std::string_view::npos;
    if (!good_) return;
    Push({.kind = Kind::kClass, .text = std::string(bytes_.substr(0, end))});
    bytes_.remove_prefix(end + 1);
  }
  // torch.Size(numbers) alone.
  void Call() {
    good_ = stack_.size() >= 2 && stack_.back().IsList() && stack_.back().items.size() == 1 &&
            stack_[stack_.size() - 2].kind == Kind::kClass &&
            stack_[stack_.size() - 2].text == "torch\nSize";
    if (!good_) return;
    Value numbers = std::move(stack_.back().items.front());
    stack_.resize(stack_.size() - 2);
    Push(std::move(numbers));
  }
  // Others are never asked for again.
  void Remember(uint64_t index) {
    good_ = good_ && !stack_.empty();
    if (!good_) return;
    const Kind kind = stack_.back().kind;
    if (kind == Kind::kText || kind == Kind::kClass) memo_[index] = stack_.back();
  }
  void Recall(uint64_t index) {
    const auto found = memo_.find(index);
    good_ = good_ && found != memo_.end();
    if (good_) Push(found->second);
  }

  std::string_view bytes_;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
  std::map<uint64_t, Value> memo_;
  bool good_ = true;
};

// ---- facts --------------------------------------------------------------------------

std::string WithoutDot(std::string text) {
  if (text.ends_with('.')) text.pop_back();
  return text;
}

// Calls `take(key, value)` for the items of a dict, or of no dict at all; false if one is odd.
template <class Function>
bool TakeItems(const Value* dict, Function take) {
  if (dict == nullptr) return true;
  if (!dict->IsDict()) return false;
  for (size_t i = 0; i + 1 < dict->items.size(); i += 2) {
    if (!take(dict->items[i], dict->items[i + 1])) return false;
  }
  return true;
}

bool TakeText(const Value& key, const Value& value,
              std::map<std::string, std::string, std::less<>>& texts) {
  if (key.IsText() && value.IsText()) texts.emplace(key.text, value.text);
  return key.IsText() && value.IsText();
}

bool TakeNumbers(const Value& label, const Value& numbers, KeyShape& keys) {
  auto& taken = keys.numbers[label.text];
  return label.IsText() && TakeItems(&numbers, [&](const Value& name, const Value& number) {
           taken.emplace(name.text, static_cast<uint64_t>(number.number));
           return name.IsText() && number.IsNumber(kAnyNumber);
         });
}

bool TakeTensor(const Value& key, const Value& tensor, KeyShape& keys) {
  if (!key.IsText() || !tensor.IsList() || tensor.items.size() != 2) return false;
  const auto dtype = DTypeFromName(tensor.items[0].text);
  Shape shape;
  for (const Value& one : tensor.items[1].items) {
    if (!one.IsNumber(kAnyNumber)) return false;
    shape.push_back(static_cast<uint64_t>(one.number));
  }
  if (dtype) keys.tensors.emplace(key.text, std::pair(*dtype, std::move(shape)));
  return dtype.has_value();
}

bool TakeKind(const Value& kind, const Value& path, KeyShape& keys) {
  std::vector<PathStep> steps;
  for (const Value& one : path.items) {
    if (one.IsText()) steps.push_back({one.text, {}});
    if (one.IsNumber(UINT32_MAX)) steps.push_back({"", static_cast<uint32_t>(one.number)});
  }
  keys.kinds.emplace(kind.text, std::move(steps));
  return kind.IsText() && path.IsList();
}

bool TakeKeys(const Value& told, StepFacts& facts) {
  KeyShape keys;
  const Value *model = told.Find("model"), *optimizers = told.Find("optimizers"),
              *flat = told.Find("flat");
  if (model == nullptr || !model->IsText() || optimizers == nullptr || flat == nullptr)
    return false;
  keys.model = WithoutDot(model->text);
  keys.flat = flat->number != 0;
  if (!optimizers->IsList()) return false;
  for (const Value& one : optimizers->items) {
    const std::string key = WithoutDot(one.text);
    if (optimizers->items.size() == 1) keys.optimizer = key;
    if (optimizers->items.size() > 1) keys.optimizers.emplace(key, key);
  }
  const bool taken =
      TakeItems(told.Find("numbers"),
                [&](const Value& a, const Value& b) { return TakeNumbers(a, b, keys); }) &&
      TakeItems(told.Find("tensors"),
                [&](const Value& a, const Value& b) { return TakeTensor(a, b, keys); }) &&
      TakeItems(told.Find("kinds"),
                [&](const Value& a, const Value& b) { return TakeKind(a, b, keys); }) &&
      TakeItems(told.Find("state_names"),
                [&](const Value& a, const Value& b) { return TakeText(a, b, keys.state_names); });
  facts.keys = std::move(keys);
  return taken;
}

bool TakeSpelling(const Value& told, StepFacts& facts) {
  KeyShape keys;
  const Value* model = told.Find("model");
  if (model == nullptr || !model->IsText()) return false;
  keys.model = model->text;
  const bool taken = TakeItems(told.Find("optimizers"), [&](const Value& a, const Value& b) {
    return TakeText(a, b, keys.optimizers);
  });
  facts.keys = std::move(keys);
  return taken;
}

bool TakeTool(const Value& told, StepFacts& facts) {
  const Value *tool = told.Find("tool"), *own = told.Find("own");
  if (tool == nullptr || own == nullptr || !tool->IsText() || !own->IsText()) return false;
  facts.tool = {tool->text, own->text};
  return true;
}

bool TakeModelFiles(const Value& told, StepFacts& facts) {
  auto& files = facts.model_files.files;
  const bool taken = TakeItems(&told, [&](const Value& name, const Value& body) {
    ModelFile file{name.text, std::make_shared<const std::string>(body.text)};
    const bool blob = body.IsNumber(UINT32_MAX);
    if (blob) file.body = BlobIndex{static_cast<uint32_t>(body.number)};
    files.push_back(std::move(file));
    return name.IsText() && (blob || body.IsText());
  });
  std::ranges::sort(files, {}, &ModelFile::name);
  return taken;
}

bool TakeMadeConfig(const Value& told, StepFacts& facts) {
  facts.config_made = true;
  return told.kind == Value::Kind::kTruth;
}

bool TakeSafetensors(const Value& told, StepFacts& facts) {
  return TakeItems(&told, [&](const Value& blob, const Value& offset) {
    if (!blob.IsNumber(UINT32_MAX) || !offset.IsNumber(kAnyNumber)) return false;
    facts.safetensors.emplace(BlobIndex{static_cast<uint32_t>(blob.number)},
                              static_cast<uint64_t>(offset.number));
    return true;
  });
}

struct OldFact {
  std::string_view key;
  bool (*take)(const Value&, StepFacts&);
};
constexpr std::array<OldFact, 6> kOldFacts = {{{"training_tool", TakeTool},
                                               {"model_files", TakeModelFiles},
                                               {"made_config", TakeMadeConfig},
                                               {"safetensors_files", TakeSafetensors},
                                               {"dcp/keys", TakeKeys},
                                               {"ckptfs.dcp", TakeSpelling}}};
constexpr std::string_view kGroupNumbers = "group_numbers";

// True if the document is a fact, and taken.
bool Take(const Document& document, StepModel& step) {
  const auto known = std::ranges::find(kOldFacts, document.key, &OldFact::key);
  const bool groups = document.key == kGroupNumbers;
  if ((known == kOldFacts.end() && !groups) || !document.tensors.empty()) return false;
  const auto told = PlainPickle(document.pickle).Read();
  if (!told) return false;
  if (groups) {
    if (!told->IsList() || told->items.size() != step.groups.size()) return false;
    for (size_t i = 0; i < step.groups.size(); ++i) {
      step.groups[i].number = static_cast<uint32_t>(told->items[i].number);
    }
    return true;
  }
  StepFacts facts = step.facts;
  if (!known->take(*told, facts) || !CheckFacts(facts, step.blobs)) return false;
  if (document.scope.empty()) step.facts = std::move(facts);  // rank 0's
  return true;
}

}  // namespace

void TakeOldFacts(StepModel& step) {
  std::erase_if(step.documents, [&](const Document& document) { return Take(document, step); });
}

bool HasDocumentNamedAsFact(const StepModel& step) {
  return std::ranges::any_of(step.documents, [](const Document& document) {
    return document.key == kGroupNumbers ||
           std::ranges::find(kOldFacts, document.key, &OldFact::key) != kOldFacts.end();
  });
}

}  // namespace ckptfs
