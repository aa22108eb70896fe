// SPDX-License-Identifier: Apache-2.0

#include "mount/manual.h"

#include <cctype>
#include <vector>

namespace ckptfs {
namespace {

std::vector<std::string> LinesOf(std::string_view text) {
  std::vector<std::string> lines;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

// One letter of text that is not a macro: backslashes and hyphens are themselves.
void AppendEscaped(std::string& out, char letter) {
  if (letter == '\\') {
    out += "\\e";
  } else if (letter == '-') {
    out += "\\-";
  } else {
    out += letter;
  }
}

std::string Escaped(std::string_view text) {
  std::string out;
  for (const char letter : text) AppendEscaped(out, letter);
  return out;
}

// A line must not begin with a control character of roff.
std::string Line(std::string text) {
  if (!text.empty() && (text[0] == '.' || text[0] == '\'')) text.insert(0, "\\&");
  return text + "\n";
}

// `code` and **bold** in bold, of [text](target) the text.
std::string Inline(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const std::string_view rest = text.substr(i);
    const std::string_view mark = rest.starts_with("**") ? "**" : rest.starts_with("`") ? "`" : "";
    const size_t end = mark.empty() ? std::string_view::npos : rest.find(mark, mark.size());
    if (end != std::string_view::npos) {
      out += "\\fB" + Escaped(rest.substr(mark.size(), end - mark.size())) + "\\fR";
      i += end + mark.size();
      continue;
    }
    const size_t middle = rest.starts_with('[') ? rest.find("](") : std::string_view::npos;
    const size_t close = middle == std::string_view::npos ? middle : rest.find(')', middle);
    if (close != std::string_view::npos && rest.find(']') == middle) {
      out += Inline(rest.substr(1, middle - 1));
      i += close + 1;
      continue;
    }
    AppendEscaped(out, text[i++]);
  }
  return out;
}

std::string_view Stripped(std::string_view text) {
  while (text.starts_with(' ')) text.remove_prefix(1);
  while (text.ends_with(' ')) text.remove_suffix(1);
  return text;
}

// The cells of "| a | b |".
std::vector<std::string_view> CellsOf(std::string_view row) {
  std::vector<std::string_view> cells;
  row.remove_prefix(1);
  while (!row.empty()) {
    const size_t end = row.find('|');
    if (end == std::string_view::npos) break;
    cells.push_back(Stripped(row.substr(0, end)));
    row.remove_prefix(end + 1);
  }
  return cells;
}

class Page {
 public:
  std::string Render(const std::vector<std::string>& lines) {
    for (const std::string& line : lines) Add(line);
    EndExample();
    return std::move(out_);
  }

 private:
  void Add(const std::string& line) {
    const bool indented = line.starts_with("    ");
    if (indented && !in_item_) return Example(line.substr(4));
    if (line.empty()) {
      blank_ = true;
      in_item_ = false;
      return;
    }
    EndExample();
    if (line.starts_with("### ")) return Heading(".SS ", line.substr(4));
    if (line.starts_with("## ")) return Heading(".SH ", line.substr(3));
    if (line.starts_with("- ")) {
      in_item_ = true;
      out_ += ".IP \\(bu 2\n" + Line(Inline(line.substr(2)));
    } else if (line.starts_with("|")) {
      Row(line);
    } else {
      if (blank_ && !in_item_) out_ += ".PP\n";
      out_ += Line(Inline(Stripped(line)));
    }
    blank_ = false;
  }

  void Heading(const char* macro, std::string_view text) {
    std::string title(text);
    if (macro[2] == 'H') {
      for (char& letter : title)
        letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
    }
    out_ += macro + Escaped(title) + "\n";
    blank_ = false;
    in_item_ = false;
  }

  // The first cell as a term, the others behind it; a row of dashes is not a row.
  void Row(std::string_view line) {
    if (line.starts_with("| ---") || line.starts_with("|---")) return;
    const auto cells = CellsOf(line);
    if (cells.empty()) return;
    out_ += ".TP\n" + Line(Inline(cells[0]));
    std::string rest;
    for (size_t i = 1; i < cells.size(); ++i) rest += (i == 1 ? "" : "; ") + Inline(cells[i]);
    out_ += Line(rest.empty() ? "\\&" : rest);
  }

  void Example(std::string_view line) {
    if (!in_example_) out_ += ".PP\n.RS 4\n.nf\n";
    if (in_example_ && blank_) out_ += "\n";
    in_example_ = true;
    blank_ = false;
    out_ += Line(Escaped(line));
  }

  void EndExample() {
    if (in_example_) out_ += ".fi\n.RE\n";
    in_example_ = false;
  }

  std::string out_;
  bool blank_ = false;
  bool in_item_ = false;
  bool in_example_ = false;
};

}  // namespace

std::string ManPageOf(std::string_view markdown, std::string_view description) {
  std::vector<std::string> lines = LinesOf(markdown);
  std::string name = "ckptfs", section = "1";
  if (!lines.empty() && lines[0].starts_with("# ")) {
    const std::string title = lines[0].substr(2);
    const size_t open = title.find('(');
    name = title.substr(0, open);
    if (open != std::string::npos) section = title.substr(open + 1, title.find(')') - open - 1);
    lines.erase(lines.begin());
  }
  std::string upper = name;
  for (char& letter : upper)
    letter = static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  return ".TH " + upper + " " + section + "\n.SH NAME\n" + name + " \\- " + Escaped(description) +
         "\n.SH DESCRIPTION\n" + Page().Render(lines);
}

}  // namespace ckptfs
