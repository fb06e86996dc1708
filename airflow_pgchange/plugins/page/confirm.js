// A dialog that shows the effects of an action before it is done.
import { chakra, h, useRef, useState } from "./shell.js";

const { Box, Button, Dialog, Input, NativeSelect, Portal, Text } = chakra;

const Choice = ({ field, value, onChange }) =>
  h(
    Box,
    { as: "fieldset", mt: 3 },
    h("legend", null, field.label),
    field.choices.map(([choice, words]) =>
      h(
        Box,
        { as: "label", key: choice, display: "flex", gap: 2, alignItems: "center", mt: 1 },
        h("input", {
          type: "radio",
          name: field.name,
          value: choice,
          checked: value === choice,
          onChange: () => onChange(choice),
        }),
        words,
      ),
    ),
  );

const Options = ({ field, value, onChange }) =>
  h(
    Box,
    { as: "label", display: "block", mt: 3 },
    field.label,
    h(
      NativeSelect.Root,
      { mt: 1 },
      h(
        NativeSelect.Field,
        { value, onChange: (event) => onChange(event.target.value) },
        field.options.map(([option, words]) => h("option", { key: option, value: option }, words)),
      ),
      h(NativeSelect.Indicator),
    ),
  );

const Field = ({ field, value, onChange }) => {
  if (field.choices) return h(Choice, { field, value, onChange });
  if (field.options) return h(Options, { field, value, onChange });
  return h(
    Box,
    { as: "label", display: "block", mt: 3 },
    field.label,
    h(Input, {
      type: field.type ?? "text",
      value,
      required: true,
      mt: 1,
      onChange: (event) => onChange(event.target.value),
    }),
  );
};

// plan: title, lines (the effects), fields (each shown while its `when` of the values is true), verb, dismiss (the label that
// changes nothing), run(values).
export const Confirm = ({ plan, onClose, onDone }) => {
  const [values, setValues] = useState(() =>
    Object.fromEntries((plan.fields ?? []).map((field) => [field.name, field.value ?? ""])),
  );
  const [failure, setFailure] = useState(null);
  const [busy, setBusy] = useState(false);
  const cancel = useRef(null);
  const fields = (plan.fields ?? []).filter((field) => field.when?.(values) ?? true);
  const complete = fields.every((field) => values[field.name].trim());
  const go = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      onDone((await plan.run(values)).done);
    } catch (error) {
      setFailure(error.message);
      setBusy(false);
    }
  };
  return h(
    Dialog.Root,
    { open: true, role: "alertdialog", onOpenChange: onClose, initialFocusEl: () => cancel.current },
    h(
      Portal,
      null,
      h(Dialog.Backdrop),
      h(
        Dialog.Positioner,
        null,
        h(
          Dialog.Content,
          null,
          h(
            "form",
            { onSubmit: go },
            h(Dialog.Header, null, h(Dialog.Title, { overflowWrap: "anywhere" }, plan.title)),
            h(
              Dialog.Body,
              { overflowWrap: "anywhere" },
              plan.lines.map((line) => h(Text, { key: line, mb: 2 }, line)),
              fields.map((field) =>
                h(Field, {
                  key: field.name,
                  field,
                  value: values[field.name],
                  onChange: (value) => setValues((before) => ({ ...before, [field.name]: value })),
                }),
              ),
              failure && h(Text, { role: "alert", color: "red.fg", mt: 3 }, failure),
            ),
            h(
              Dialog.Footer,
              null,
              h(Button, { ref: cancel, type: "button", variant: "outline", onClick: onClose }, plan.dismiss ?? "Cancel"),
              h(
                Button,
                { type: "submit", colorPalette: plan.danger ? "red" : "blue", disabled: busy || !complete },
                plan.verb,
              ),
            ),
          ),
        ),
      ),
    ),
  );
};
