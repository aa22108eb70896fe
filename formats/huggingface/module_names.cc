// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/module_names.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/base/strings.h"
#include "formats/huggingface/shown_tensors.h"

namespace ckptfs::huggingface {
namespace {

// Buffers that modules of transformers 4 saved and 5 computes.
constexpr std::array<std::string_view, 4> kComputed = {"inv_freq", "position_ids", "masked_bias",
                                                       "attn.bias"};

std::string_view TakeLine(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

std::string_view TakeWord(std::string_view& line) {
  const size_t end = std::min(line.find(' '), line.size());
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(std::min(end + 1, line.size()));
  return word;
}

Error Malformed(std::string_view line) {
  return {ErrorCode::kInternal, StrCat("module_names.txt: '", line, "'")};
}

// "a.{b,c}.d" -> a.b.d, a.c.d
void Expand(std::string_view pattern, std::set<std::string>& out) {
  const size_t open = pattern.find('{');
  const size_t close = open == pattern.npos ? open : pattern.find('}', open);
  if (close == pattern.npos) {
    out.emplace(pattern);
    return;
  }
  std::string_view words = pattern.substr(open + 1, close - open - 1);
  while (!words.empty()) {
    const size_t comma = std::min(words.find(','), words.size());
    out.insert(StrCat(pattern.substr(0, open), words.substr(0, comma), pattern.substr(close + 1)));
    words.remove_prefix(std::min(comma + 1, words.size()));
  }
}

struct Mark {
  std::string_view text;
  std::set<std::string> ModuleNames::*one;
  std::set<std::string> ModuleNames::*other;  // may be null
};
constexpr std::array<Mark, 9> kMarks = {{
    {"+", &ModuleNames::required, nullptr},
    {"t", &ModuleNames::tied, nullptr},
    {"?", &ModuleNames::optional, nullptr},
    {"x", &ModuleNames::not_loaded, nullptr},
    {"f", &ModuleNames::in_files, nullptr},
    {"F", &ModuleNames::optional_in_files, nullptr},
    {"=", &ModuleNames::required, &ModuleNames::in_files},
    {"~", &ModuleNames::optional, &ModuleNames::optional_in_files},
    {"T", &ModuleNames::tied, &ModuleNames::optional_in_files},
}};

// "! q_lora_rank a.{b,c}.d"
Status ReadSetting(std::string_view line, bool null, ModuleNames& names) {
  const std::string_view whole = line;
  const std::string_view key = TakeWord(line);
  if (key.empty() || line.empty()) return Fail(Malformed(whole));
  std::set<std::string> expanded;
  Expand(line, expanded);
  for (const std::string& name : expanded) {
    names.by_setting.push_back({std::string(key), null, name});
  }
  return {};
}

// The templates that follow the lines of classes; stops at the next of those.
Status ReadTemplates(std::string_view text, ModuleNames& names) {
  while (!text.empty() && text.starts_with("class ")) TakeLine(text);
  while (!text.empty() && !text.starts_with("class ")) {
    std::string_view line = TakeLine(text);
    if (line.empty() || line.starts_with('#')) continue;
    const std::string_view whole = line;
    const std::string_view text_of_mark = TakeWord(line);
    if (text_of_mark == "!" || text_of_mark == "0") {
      CKPT_RETURN_IF_ERROR(ReadSetting(line, text_of_mark == "0", names));
      continue;
    }
    const auto mark = std::find_if(kMarks.begin(), kMarks.end(),
                                   [&](const Mark& one) { return one.text == text_of_mark; });
    if (mark == kMarks.end() || line.empty()) return Fail(Malformed(whole));
    Expand(line, names.*mark->one);
    if (mark->other != nullptr) Expand(line, names.*mark->other);
  }
  return {};
}

// Keeps what holds of any class of the model type: heads are the class's own.
void KeepBaseModel(ModuleNames& names) {
  const std::string base = StrCat(names.prefix, ".");
  const auto head = [&](const std::string& name) { return !name.starts_with(base); };
  std::erase_if(names.required, head);
  std::erase_if(names.in_files, head);
  names.tied.clear();
  names.base_alone = true;
}

bool Knows(const ModuleNames& wanted, const std::string& name) {
  return wanted.required.contains(name) || wanted.tied.contains(name) ||
         wanted.optional.contains(name) || wanted.not_loaded.contains(name);
}

bool KnowsInFiles(const ModuleNames& wanted, const std::string& name) {
  return wanted.in_files.contains(name) || wanted.optional_in_files.contains(name);
}

bool IsComputed(std::string_view name) {
  return std::any_of(kComputed.begin(), kComputed.end(),
                     [&](std::string_view end) { return name.ends_with(end); });
}

std::vector<std::string> Lacking(const std::set<std::string>& wanted,
                                 const std::set<std::string>& had) {
  std::vector<std::string> out;
  std::set_difference(wanted.begin(), wanted.end(), had.begin(), had.end(),
                      std::back_inserter(out));
  return out;
}

// `shown[i]` is the spelling of names[i] that is compared.
NamesFound Compare(const ModuleNames& wanted, std::span<const std::string> names,
                   std::span<const std::string> shown, bool tied) {
  NamesFound found;
  std::set<std::string> had;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string spelled = TemplateOfName(shown[i]);
    had.insert(spelled);
    const bool in_files = KnowsInFiles(wanted, spelled);
    const bool of_modules = Knows(wanted, spelled);
    if (wanted.not_loaded.contains(
            spelled)) {  // a file's tensor of that name may be another, or turned
      found.not_loaded.push_back(names[i]);
    } else if (of_modules && !in_files && !wanted.in_files.empty()) {
      found.of_modules.push_back(names[i]);
    } else if (!of_modules && !in_files && !wanted.base_alone && !IsComputed(names[i])) {
      found.ignored.push_back(names[i]);
    }
  }
  found.missing = Lacking(wanted.required, had);
  std::vector<std::string> heads;  // that both spellings call alike
  if (!tied) {
    // T5's two tables of words are tied to a third, whatever its config says of the head.
    for (std::string& name : Lacking(wanted.tied, had)) {
      if (!IsHead(name)) continue;
      const bool alike = wanted.in_files.empty() || KnowsInFiles(wanted, name);
      (alike ? heads : found.missing).push_back(std::move(name));
    }
  }
  if (!wanted.in_files.empty()) {
    std::vector<std::string> as_files = Lacking(wanted.in_files, had);
    if (as_files.size() < found.missing.size()) found.missing = std::move(as_files);
  }
  found.missing.insert(found.missing.end(), heads.begin(), heads.end());
  return found;
}

}  // namespace

void ModuleNames::Require(const std::set<std::string, std::less<>>& nulls) {
  for (const SettingName& one : by_setting) {
    if (nulls.contains(one.key) != one.null) continue;
    if (optional.contains(one.name)) required.insert(one.name);
    if (optional_in_files.contains(one.name)) in_files.insert(one.name);
  }
}

std::string TemplateOfName(std::string_view name) {
  std::string out;
  for (size_t i = 0; i <= name.size();) {
    const size_t end = std::min(name.find('.', i), name.size());
    const std::string_view word = name.substr(i, end - i);
    const bool number = !word.empty() && word.find_first_not_of("0123456789") == word.npos;
    out += StrCat(i == 0 ? "" : ".", number ? "#" : word);
    i = end + 1;
  }
  return out;
}

Result<std::optional<ModuleNames>> FindModuleNames(std::string_view text,
                                                   std::string_view class_name,
                                                   std::string_view model_type) {
  std::optional<ModuleNames> of_type;
  std::string_view templates;  // behind the class that was found
  while (!text.empty()) {
    std::string_view line = TakeLine(text);
    const std::string_view whole = line;
    if (TakeWord(line) != "class") continue;
    ModuleNames names;
    names.class_name = TakeWord(line);
    names.model_type = TakeWord(line);
    names.prefix = TakeWord(line);
    if (names.prefix.empty()) return Fail(Malformed(whole));
    const bool exact = names.class_name == class_name;
    if (!exact && (of_type || names.model_type != model_type || model_type.empty())) continue;
    templates = text;
    of_type = std::move(names);
    if (exact) break;
  }
  if (!of_type) return of_type;
  CKPT_RETURN_IF_ERROR(ReadTemplates(templates, *of_type));
  if (of_type->class_name != class_name) KeepBaseModel(*of_type);
  return of_type;
}

NamesFound CompareNames(const ModuleNames& wanted, std::span<const std::string> names, bool tied) {
  const auto bad = [](const NamesFound& found) {
    return found.missing.size() + found.not_loaded.size();
  };
  NamesFound best = Compare(wanted, names, names, tied);
  if (bad(best) == 0) return best;
  const std::string prefix = StrCat(wanted.prefix, ".");
  std::vector<std::string> added, taken;
  for (const std::string& name : names) {
    added.push_back(prefix + name);
    taken.push_back(name.starts_with(prefix) ? name.substr(prefix.size()) : name);
  }
  for (const auto* shown : {&added, &taken}) {
    NamesFound other = Compare(wanted, names, *shown, tied);
    if (bad(other) < bad(best)) best = std::move(other);
  }
  return best;
}

}  // namespace ckptfs::huggingface
