// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/config_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <map>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/edit_distance.h"
#include "core/base/strings.h"
#include "core/base/trust.h"
#include "core/model/toml_file.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

constexpr std::array<std::string_view, 2> kConfigCommands = {"mount", "daemon"};
constexpr size_t kConfigTypingErrors = 3;  // between a key and the option that was meant

std::string LineError(const std::string& path, const toml::node& node, std::string_view rule) {
  return StrCat(path, ":", node.source().begin.line, ": ", rule);
}

// The errors of a file, in the order of its lines.
class ConfigErrors {
 public:
  explicit ConfigErrors(const std::string& path) : path_(path) {}
  void Add(const toml::node& node, std::string_view rule) {
    lines_.emplace(node.source().begin.line, LineError(path_, node, rule));
  }
  std::vector<std::string> Take() const {
    std::vector<std::string> errors;
    for (const auto& [line, error] : lines_) errors.push_back(error);
    return errors;
  }

 private:
  const std::string& path_;
  std::multimap<uint32_t, std::string> lines_;
};

// The option of a key, also of those that only files have.
CommandOption* OptionOf(Command& command, std::string_view key) {
  for (auto* options : {&command.options, &command.file_options}) {
    for (CommandOption& option : *options) {
      const bool fits = !option.positional() && !option.line_only &&
                        std::string_view(option.name).substr(2) == key;
      if (fits) return &option;
    }
  }
  return nullptr;
}

std::vector<std::string> KeysOf(const Command& command) {
  std::vector<std::string> keys;
  for (const auto* options : {&command.options, &command.file_options}) {
    for (const CommandOption& option : *options) {
      if (!option.positional() && !option.line_only) keys.push_back(option.name.substr(2));
    }
  }
  return keys;
}

// A text or a whole number; an error is a rule.
Result<std::string> ScalarText(const toml::node& node) {
  if (const auto text = node.value_exact<std::string>()) {
    if (text->find('\0') == std::string::npos) return *text;
    return Fail(ErrorCode::kInvalid, "a text has no NUL");
  }
  if (const auto number = node.value_exact<int64_t>()) {
    if (*number >= 0) return std::to_string(*number);
    return Fail(ErrorCode::kInvalid, "a number is at least 0");
  }
  return Fail(ErrorCode::kInvalid, "a value is a text or a whole number");
}

// For options that take no path as it was written; FROM=TO has it at its end.
bool IsPathOf(const CommandOption& option, const std::string& value) {
  if (option.value == "FILE|syslog|stderr") return value != "syslog" && value != "stderr";
  return option.value == "DIR" || option.value == "PATH" || option.value == "FILE";
}

// A path of this machine, or the address of something else ("s3://...").
bool IsAbsolute(const std::string& value) {
  return value.starts_with('/') || value.find("://") != std::string::npos;
}

Status CheckText(const CommandOption& option, const std::string& text) {
  if (IsPathOf(option, text) && !IsAbsolute(text)) {
    return Fail(ErrorCode::kInvalid, StrCat("'", text, "' is not an absolute path"));
  }
  if (!option.check) return {};
  const std::string why = option.check(text);
  return why.empty() ? Status() : Fail(ErrorCode::kInvalid, why);
}

// The numbers of an option, which the command line's parser would check.
template <class Number>
Status SetNumber(Number* target, const std::string& text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    return Fail(ErrorCode::kInvalid, StrCat("'", text, "' is not a whole number"));
  }
  *target = number;
  return {};
}

// One key of the file: what it would set, and where it stands.
struct ConfigItem {
  CommandOption* option = nullptr;
  const toml::node* node = nullptr;
  std::vector<std::string> values;  // of a flag that is given: "true"
};

Result<std::vector<std::string>> ValuesOf(const CommandOption& option, const toml::node& node) {
  if (std::holds_alternative<bool*>(option.target)) {
    const auto flag = node.value_exact<bool>();
    if (!flag) return Fail(ErrorCode::kInvalid, "it is true or false");
    return *flag ? std::vector<std::string>{"true"} : std::vector<std::string>();
  }
  std::vector<std::string> values;
  const toml::array* const list = node.as_array();
  if (list != nullptr && !option.many()) return Fail(ErrorCode::kInvalid, "it has one value");
  for (size_t i = 0; i < (list == nullptr ? 1 : list->size()); ++i) {
    CKPT_ASSIGN_OR_RETURN(std::string text, ScalarText(list == nullptr ? node : *list->get(i)));
    CKPT_RETURN_IF_ERROR(CheckText(option, text));
    values.push_back(std::move(text));
  }
  return values;
}

Status SetOption(const CommandOption& option, const std::vector<std::string>& values) {
  if (values.empty()) return {};
  if (const auto flag = std::get_if<bool*>(&option.target)) return **flag = true, Status();
  if (const auto many = std::get_if<std::vector<std::string>*>(&option.target)) {
    return **many = values, Status();
  }
  if (const auto count = std::get_if<unsigned*>(&option.target)) {
    return SetNumber(*count, values[0]);
  }
  if (const auto count = std::get_if<uint64_t*>(&option.target)) {
    return SetNumber(*count, values[0]);
  }
  **std::get_if<std::string*>(&option.target) = values[0];
  return {};
}

// The option of the file that cannot stand beside this one.
const CommandOption* Excluded(const ConfigItem& item, const std::vector<ConfigItem>& items) {
  for (const ConfigItem& other : items) {
    const bool pair = item.option->excludes == other.option->name;
    if (pair && !item.values.empty() && !other.values.empty()) return other.option;
  }
  return nullptr;
}

Result<const toml::table*> TableOf(const toml::table& file, const std::string& path,
                                   std::string_view name) {
  const toml::node* const node = file.get(name);
  if (node == nullptr) return nullptr;
  if (node->is_table()) return node->as_table();
  return Fail(ErrorCode::kInvalid, LineError(path, *node, StrCat("[", name, "] is a table")));
}

Result<std::string> CommandOfTable(const toml::table& file, const std::string& path) {
  std::string command;
  for (const std::string_view name : kConfigCommands) {
    CKPT_ASSIGN_OR_RETURN(const toml::table* const table, TableOf(file, path, name));
    if (table == nullptr) continue;
    if (!command.empty()) {
      return Fail(ErrorCode::kInvalid,
                  LineError(path, *table, "a file is for one mount or one daemon"));
    }
    command = name;
  }
  if (!command.empty()) return command;
  return Fail(ErrorCode::kInvalid, StrCat(path, ":1: it has no table [mount] or [daemon]"));
}

}  // namespace

Result<std::string> ConfigPath(const std::string& text) {
  if (text.find('/') != std::string::npos) return AbsolutePath(text);
  return StrCat(kConfigDirectory, "/", text, text.ends_with(".toml") ? "" : ".toml");
}

Result<std::string> ReadConfigText(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  struct stat info {};
  if (!file.valid() || ::fstat(file.get(), &info) != 0) return Fail(ErrnoError(errno, path));
  if (!S_ISREG(info.st_mode)) return Fail(ErrorCode::kInvalid, StrCat(path, ": not a file"));
  const std::string why = WhyNotTrusted(info, Believed::kOwnUserOrRoot);
  if (!why.empty()) {
    return Fail(ErrorCode::kPermission, StrCat(path, " ", why, "; it is not believed"));
  }
  std::string text(kConfigBytes + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(file.get(), text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Fail(ErrnoError(errno, path));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  if (size > kConfigBytes) return Fail(ErrorCode::kInvalid, StrCat(path, ": longer than 1 MiB"));
  text.resize(size);
  return text;
}

Result<std::string> CommandOfConfig(std::string_view text, const std::string& path) {
  CKPT_ASSIGN_OR_RETURN(const toml::table file, ParseToml(text, path));
  return CommandOfTable(file, path);
}

namespace {

std::string NameOf(const CommandOption& option) { return option.name.substr(2); }

// Finds the option that each key of the command's table would set.
std::vector<ConfigItem> ItemsOf(const toml::table& table, Command& command, ConfigErrors& errors) {
  std::vector<ConfigItem> items;
  for (const auto& [key, node] : table) {
    CommandOption* const option = OptionOf(command, key.str());
    if (option == nullptr) {
      const std::string near = MeantText(key.str(), KeysOf(command), kConfigTypingErrors);
      errors.Add(node, StrCat("'", key.str(), "' is not an option of [", command.name, "]", near));
      continue;
    }
    auto values = ValuesOf(*option, node);
    if (values) {
      items.push_back({option, &node, *std::move(values)});
    } else {
      errors.Add(node, StrCat(key.str(), ": ", values.error().message));
    }
  }
  for (const ConfigItem& item : items) {
    const CommandOption* const other = Excluded(item, items);
    if (other == nullptr) continue;
    errors.Add(*item.node,
               StrCat(NameOf(*item.option), " and ", NameOf(*other), " exclude each other"));
  }
  return items;
}

// True if the command line says the option, or one that excludes it.
bool IsSaid(const CommandOption& option, const Command& command,
            const std::set<std::string>& given) {
  if (given.contains(option.name) || given.contains(option.excludes)) return true;
  return std::ranges::any_of(command.options, [&](const CommandOption& other) {
    return other.excludes == option.name && given.contains(other.name);
  });
}

}  // namespace

std::vector<std::string> ApplyConfig(std::string_view text, const std::string& path,
                                     const std::set<std::string>& given, Command& command) {
  const auto file = ParseToml(text, path);
  if (!file) return {file.error().message};
  const auto name = CommandOfTable(*file, path);
  if (!name) return {name.error().message};
  if (*name != command.name) {
    return {StrCat(path, ":1: it is for `ckptfs ", *name, "`, not for `", command.name, "`")};
  }
  ConfigErrors errors(path);
  for (const auto& [key, node] : *file) {
    if (key.str() == *name) continue;
    errors.Add(node, StrCat("'", key.str(), "' does not stand below [", *name, "]"));
  }
  const auto items = ItemsOf(*file->get(*name)->as_table(), command, errors);
  if (auto wrong = errors.Take(); !wrong.empty()) return wrong;
  for (const ConfigItem& item : items) {
    if (IsSaid(*item.option, command, given)) continue;
    if (const Status set = SetOption(*item.option, item.values); !set) {
      errors.Add(*item.node, StrCat(NameOf(*item.option), ": ", set.error().message));
    }
    command.from_file.insert(item.option->name);
  }
  return errors.Take();
}

}  // namespace ckptfs
