// SPDX-License-Identifier: Apache-2.0
//
// ModuleNames are the names that a class of transformers gives its tensors, and what
// from_pretrained makes of other names: it begins what it does not find with random values, and
// takes no notice of what it does not know.  module_names.txt has them of transformers 5.23
// (module_names.py makes it):
//
//   block    = 1*( "class" SP class SP model_type SP base_model_prefix LF ) 1*( mark SP template LF
//   ) template = name with "#" for each number, and at most one "{" word *( "," word ) "}" mark =
//   "+" every such model has it     "?" some have it, by the config
//            | "t" has it, but may be tied     "x" not loaded under the module's own name
//            | "f" "+" as files spell it       "F" "?" as files spell it
//            | "=" "+" and "f"   "~" "?" and "F"   "T" "t" and "F"
//   setting  = ( "!" | "0" ) SP key SP template LF   among the lines of a block: a "?" template
//   that a
//              model has if the config's value of the key is null ("0"), or is not or absent ("!")
//
// Thread safety: pure functions.

#pragma once

#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"

namespace ckptfs::huggingface {

// The text of module_names.txt.
std::string_view ModuleNamesText();

// A template that is required by a setting of the config.
struct SettingName {
  std::string key;
  bool null = false;  // required where the value is null; else where it is not
  std::string name;
};

struct ModuleNames {
  std::string class_name;
  std::string model_type;
  std::string prefix;              // base_model_prefix
  bool base_alone = false;         // of another class with the same base model: no heads
  std::set<std::string> required;  // templates
  std::set<std::string> tied;      // required unless the config ties them
  std::set<std::string> optional;
  std::set<std::string> not_loaded;  // not loaded under the module's own name
  std::set<std::string> in_files;    // required, as files spell them
  std::set<std::string> optional_in_files;
  std::vector<SettingName> by_setting;

  // Makes those required that the config asks for; `nulls`: its keys whose values are null.
  void Require(const std::set<std::string, std::less<>>& nulls);
};

// Returns the names of the class; else those of a class of that model type, of which only the
// base model's count.  Nothing if `text` has neither.  kInternal if it is not of the form above.
Result<std::optional<ModuleNames>> FindModuleNames(std::string_view text,
                                                   std::string_view class_name,
                                                   std::string_view model_type);

// "#" for every component of the name that is a number.
std::string TemplateOfName(std::string_view name);

struct NamesFound {
  std::vector<std::string> missing;     // templates that from_pretrained would begin at random
  std::vector<std::string> ignored;     // names that no module is known to have; none if base_alone
  std::vector<std::string> not_loaded;  // names of modules that it reads under other names alone
  std::vector<std::string> of_modules;  // names that other readers of files do not know
};

// Returns what from_pretrained finds among `names`: the best
// of those with the base model's prefix, without it and with
// it added.  `tied`: the config's, false only if it says so.
NamesFound CompareNames(const ModuleNames& wanted, std::span<const std::string> names, bool tied);

}  // namespace ckptfs::huggingface
